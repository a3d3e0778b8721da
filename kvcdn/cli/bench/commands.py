"""`kvcdn bench`: measurements on the user's own box, as medians of runs that alternate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcdn.cli.bench.comparison import against
from kvcdn.cli.bench.machine import machine
from kvcdn.cli.bench.reporting import report, run_all
from kvcdn.cli.options import AsJson, Device, Measured, Model, Runs
from kvcdn.cli.output import note, print_json, print_table, print_text, size
from kvcdn.errors import UsageError

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)

app.command()(against)
app.command("all")(run_all)
app.command()(report)


@app.callback()
def _bench() -> None:
    """Measure on this machine."""


@app.command()
def ttft(
    tokens: Annotated[int, typer.Option(min=16, help="Length of the document.")] = 3774,
    model: Model = "smollm2-135m",
    document: Measured = None,
    runs: Runs = 5,
    device: Device = "cpu",
    *,
    as_json: AsJson = False,
) -> None:
    """Time to first token: stock prefill, a warm edge, the local store, and the floor (KV already in memory), alternating."""
    from kvcdn.cli.bench.ttft import measure_ttft  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.cli.publish import progress_bar  # noqa: PLC0415

    note(f"publishing {tokens:,} tokens with {model}, then {runs} rounds of prefill, edge, local store and floor ...")
    with progress_bar("document", tokens) as progress:
        result = measure_ttft(model, document, tokens, runs, device, progress=progress, tell=note)
    if as_json:
        print_json(result)
        return
    rows = [
        [name, f"{result[key]:.3f} s", f"{result['prefill_ttft_s'] / result[key]:.1f} x"]
        for name, key in (
            ("prefill", "prefill_ttft_s"),
            ("edge, warm", "edge_ttft_s"),
            ("local store", "local_ttft_s"),
            ("KV in memory", "floor_ttft_s"),
        )
    ]
    print_table(["FIRST TOKEN", "AFTER", "FASTER"], rows)
    bits = "bit-identical" if result["bit_identical"] else "NOT bit-identical"
    wire = f"{size(result['wire_bytes'])} on the wire ({result['wire_ratio']:.3f})"
    print_text(f"\n{size(result['raw_bytes'])} raw, {wire}, {bits}, {result['over_floor']:.2f} x the floor")


@app.command()
def publish(
    tokens: Annotated[int, typer.Option(min=64, help="Length of the document.")] = 2048,
    model: Model = "smollm2-135m",
    document: Measured = None,
    runs: Runs = 5,
    device: Device = "cpu",
    *,
    as_json: AsJson = False,
) -> None:
    """Publishing beside the bare prefill loop over the same tokens, taking turns."""
    from kvcdn.cli.bench.publish import measure_publish  # noqa: PLC0415 - see kvcdn.cli

    result = measure_publish(model, document, tokens, runs, device, note)
    if as_json:
        print_json(result)
        return
    print_table(
        ["WAY", "TOKENS/S"],
        [["prefill alone", f"{result['prefill_tok_s']:.1f}"], ["publish", f"{result['publish_tok_s']:.1f}"]],
    )
    memory = "" if result["memory_bytes"] is None else f", {size(result['memory_bytes'])} of memory beside the model"
    print_text(f"\nratio {result['ratio']:.3f}; {size(result['raw_bytes'])} of KV{memory}")
    if result["shared_ratio"] is not None:
        print_text(
            f"behind a prompt that is published, a document costs {result['shared_ratio']:.3f} x the passes over its rest"
        )


@app.command()
def workers(
    documents: Annotated[int, typer.Option(min=1, help="Documents, which share nothing.")] = 20,
    tokens: Annotated[int, typer.Option(min=16, help="Length of each.")] = 1024,
    workers: Annotated[int, typer.Option(min=2, help="Workers of one thread, beside one worker of one thread.")] = 2,
    executor: Annotated[str, typer.Option(help="What runs them: processes or ray.")] = "ray",
    model: Model = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each, alternating.")] = 3,
    *,
    as_json: AsJson = False,
) -> None:
    """Documents through a prefill service with one worker, and with several, taking turns."""
    from kvcdn.cli.bench.workers import measure_workers  # noqa: PLC0415 - see kvcdn.cli

    if executor not in ("processes", "ray"):
        raise UsageError(f"--executor {executor} is not known", hint="processes or ray")
    result = measure_workers(model, documents, tokens, workers, executor, rounds, note)
    if as_json:
        print_json(result)
        return
    print_table(
        ["WORKERS", "SECONDS"], [["1", f"{result['one_s']:.2f}"], [f"{workers}, {executor}", f"{result['several_s']:.2f}"]]
    )
    print_text(f"\n{result['speedup']:.2f} x")


@app.command()
def edge(
    against: Annotated[str, typer.Option(help="What to measure beside; only nginx is known.")] = "nginx",
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a round of warm hits.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each server, alternating.")] = 5,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once on one cold object.")] = 200,
    cold_size: Annotated[str, typer.Option(help="Size of that object.")] = "256MiB",
    readers: Annotated[int, typer.Option(min=1, help="Readers that stop reading.")] = 1000,
    slow_size: Annotated[str, typer.Option(help="Size of the object that they hold; it is written twice.")] = "5GiB",
    *,
    as_json: AsJson = False,
) -> None:
    """Warm hits, cold misses, a stampede and slow readers of an edge, beside nginx on the same machine."""
    from kvcdn.cli.bench.edge import Sizes, measure_edge  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.sizes import parse_size  # noqa: PLC0415

    if against != "nginx":
        raise UsageError(f"{against} is nothing to measure against", hint="--against nginx")
    try:
        cold_bytes, slow_bytes = parse_size(cold_size), parse_size(slow_size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    sizes = Sizes(seconds, rounds, clients=clients, cold_bytes=cold_bytes, readers=readers, slow_bytes=slow_bytes)
    result = measure_edge(sizes, note)
    if as_json:
        print_json(result)
        return
    print_table(
        ["BYTES", "CONNECTIONS", "GBIT/S", "NGINX", "RATIO", "P99 FIRST BYTE", "NGINX"],
        [
            [
                f"{row['size']:,}",
                str(row["connections"]),
                f"{row['gbps']:.2f}",
                f"{row['nginx_gbps']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['p99_ttfb_ms']:.2f} ms",
                f"{row['nginx_p99_ttfb_ms']:.2f} ms",
            ]
            for row in [*result["rows"], result["manifests"]]
        ],
    )


@app.command()
def restart(
    objects: Annotated[int, typer.Option(min=1, help="Files in the cache.")] = 100_000,
    runs: Annotated[int, typer.Option(min=1, help="Starts of each kind.")] = 3,
    *,
    as_json: AsJson = False,
) -> None:
    """How long an edge with a full cache takes to start: by its index, and by a walk where there is none."""
    from kvcdn.cli.bench.restart import measure_restart  # noqa: PLC0415 - see kvcdn.cli

    result = measure_restart(objects, runs, note)
    if as_json:
        print_json(result)
        return
    rows = [
        [name, f"{result[key]:.2f} s"] for name, key in (("index", "index_s"), ("walk", "walk_s"), ("empty cache", "empty_s"))
    ]
    print_table(["START BY", "READY AFTER"], rows)


@app.command()
def decode(
    tokens: Annotated[str, typer.Option(help="Lengths of the cache, in tokens.")] = "1024,4096",
    model: Model = "smollm2-135m",
    steps: Annotated[int, typer.Option(min=1, help="Decoded tokens counted of each kind.")] = 40,
    device: Device = "cpu",
    *,
    as_json: AsJson = False,
) -> None:
    """Time of one decoded token: the cache of a loaded prefix against transformers' own DynamicCache, alternating."""
    from kvcdn.cli.bench.decode import measure_decode  # noqa: PLC0415 - see kvcdn.cli

    try:
        lengths = [int(word) for word in tokens.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UsageError(f"--tokens {tokens} is not a list of lengths", hint="such as 1024,4096")
    result = measure_decode(model, lengths, steps, device, note)
    if as_json:
        print_json(result)
        return
    cells = [
        [f"{row['tokens']:,}", f"{row['ours_ms']:.1f} ms", f"{row['dynamic_ms']:.1f} ms", f"{row['ratio']:.2f}"]
        for row in result["rows"]
    ]
    print_table(["TOKENS", "OURS", "DYNAMICCACHE", "RATIO"], cells)


@app.command()
def crossover(
    tokens: Annotated[int, typer.Option(min=16, help="Length of the document.")] = 3774,
    model: Model = "smollm2-135m",
    document: Measured = None,
    mbit: Annotated[str, typer.Option(help="Links in Mbit/s, such as 1,10,100; by default around the crossover.")] = "",
    runs: Annotated[int, typer.Option(min=1, help="Rounds on each link; each prefills once.")] = 3,
    latency: Annotated[float, typer.Option(min=0, max=2, help="Seconds that each request takes besides.")] = 0.0,
    fetch_limit: Annotated[float, typer.Option(min=1, help="Seconds; longer fetches are estimated, and marked so.")] = 120.0,
    kill: Annotated[int, typer.Option(min=0, help="How often to kill the edge at a random moment, at the end.")] = 0,
    device: Device = "cpu",
    *,
    as_json: AsJson = False,
) -> None:
    """Prefill, fetch, and what the plan makes of both, on links of several speeds, shaped for real."""
    links = _numbers(mbit, "--mbit", 1e6) if mbit else []
    from kvcdn.cli.bench.crossover import measure_crossover  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.cli.publish import progress_bar  # noqa: PLC0415

    note(f"publishing {tokens:,} tokens with {model} ...")
    with progress_bar("document", tokens) as progress:
        result = measure_crossover(
            model,
            document,
            tokens,
            links,
            runs,
            device,
            latency_s=latency,
            fetch_limit_s=fetch_limit,
            kills=kill,
            progress=progress,
            tell=note,
        )
    if as_json:
        print_json(result)
        return
    print_table(
        ["MBIT/S", "PREFILL", "FETCH", "AUTO", "DECISION", "OVER THE BETTER"],
        [
            [
                f"{row['mbit']:g}" if row["shaped"] else f"{row['mbit']:g} (this machine: {row['measured_mbit']:.0f})",
                f"{row['prefill_s']:.2f} s",
                f"{row['fetch_s']:.2f} s" + (" (estimated)" if row["fetch_estimated"] else ""),
                f"{row['auto_s']:.2f} s",
                row["decision"],
                f"{row['auto_over_best']:.2f} x",
            ]
            for row in result["rows"]
        ],
    )
    if "kill" in result:
        print_text(f"\nedge killed at {kill} random moments: at most {result['kill']['worst_over_prefill']:.2f} x a prefill")


@app.command()
def codec(
    model: Model = "smollm2-135m",
    document: Annotated[
        list[Path] | None, typer.Option(help="A text file, also several times; by default a text, code and a table.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=16, help="Tokens of each document, without the 256 behind that are compared.")
    ] = 2048,
    runs: Annotated[int, typer.Option(min=1, help="Times a block is decoded; the median counts.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="A .png or .svg file for the rate-distortion plot.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Size, speed and quality of every precision on real documents, beside recomputing, plain zstd and 8 bits a tensor."""
    from kvcdn.cli.bench.codec import PUBLISHED, measure_codecs  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.cli.bench.codec_plot import draw_codecs  # noqa: PLC0415

    rows = list(measure_codecs(model, document or [], tokens, runs, note))
    if plot:
        draw_codecs(rows, PUBLISHED, plot)
    if as_json:
        print_json({"model": model, "tokens": tokens, "runs": runs, "rows": rows, "published": PUBLISHED, "machine": machine()})
        return
    print_table(
        ["DOCUMENT", "CODEC", "RATIO", "DECODE GB/S", "KL", "X NOISE", "TOP-1", "GREEDY"],
        [
            [
                row["document"],
                row["codec"],
                f"{row['ratio']:.4f}",
                f"{row['decode_gbps_per_core']:.2f}" if "decode_gbps_per_core" in row else "-",
                *(
                    (
                        f"{row['kl']:.5f}",
                        f"{row['kl'] / row['kl_recompute']:.2f}" if row["kl_recompute"] else "-",
                        f"{row['top1']:.1%}",
                        f"{row['greedy_equal']} of {row['greedy_total']}",
                    )
                    if "kl" in row
                    else ("-",) * 4
                ),
            ]
            for row in rows
        ],
    )
    for one in PUBLISHED:
        print_text(f"{one['codec']}: {one['published']}")


@app.command()
def eviction(
    trace: Annotated[Path, typer.Option(help="JSON lines with hash_ids, a prompt's prefix blocks; .gz is read as well.")],
    capacity: Annotated[str, typer.Option(help="Cache sizes, in percent of the trace's distinct blocks.")] = "1,5,20,50",
    *,
    as_json: AsJson = False,
) -> None:
    """Share of blocks that hit, counted from each prompt's beginning, by eviction policy and cache size; simulated."""
    from kvcdn.cli.bench.eviction import compare, simulate  # noqa: PLC0415 - see kvcdn.cli

    rows = []
    for row in simulate(trace, _percentages(capacity)):
        note(f"{row['capacity']:g} % {row['policy']}: {row['byte_hit']:.4f} in {row['seconds']:.1f} s")
        rows.append(row)
    compared = compare(rows)
    if as_json:
        print_json({"trace": trace.name, "rows": rows, "compared": compared, "machine": machine()})
        return
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    hits = {(row["capacity"], row["policy"]): f"{row['byte_hit']:.4f}" for row in rows}
    print_table(
        ["CAPACITY", *(policy.upper() for policy in policies), "GAP CLOSED"],
        [
            [f"{one['capacity']:g} %", *(hits[one["capacity"], policy] for policy in policies), _share(one["gap_closed"])]
            for one in compared
        ],
    )


def _percentages(text: str) -> list[float]:
    return _numbers(text, "--capacity", 100)


def _numbers(text: str, option: str, most: float) -> list[float]:
    """Numbers above 0, at most `most`, none twice. Raises UsageError."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value <= most for value in values) or len(set(values)) < len(values):
        raise UsageError(f"{option} {text} is not a list of numbers up to {most:g}", hint="such as 1,5,20,50")
    return [int(value) if value.is_integer() else value for value in values]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
