"""`kvcdn simulate`: what kvcdn would do for one's own traffic and topology, simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcdn.cli.options import AsJson, refuse_others
from kvcdn.cli.output import note, print_json, print_table, print_text, size, ticking
from kvcdn.errors import UsageError

if TYPE_CHECKING:
    from kvcdn.simulation.comparison import Traffic
    from kvcdn.simulation.topology import Topology


def simulate(
    ctx: typer.Context,
    topology: Annotated[
        str, typer.Argument(help="A TOML file such as infra/simulation.toml, or a preset: cluster, laptops, office.")
    ] = "cluster",
    trace: Annotated[
        Path | None, typer.Option(help="Requests: JSON lines with timestamp, input_length and hash_ids, gzipped or not.")
    ] = None,
    rate: Annotated[float, typer.Option(help="A trace's requests come so many times as fast.")] = 1.0,
    readers: Annotated[float, typer.Option(help="Without a trace: readers, each of whom asks one question.")] = 20_000,
    days: Annotated[float, typer.Option(help="In how many days they all ask.")] = 1.0,
    documents: Annotated[int, typer.Option(help="Documents that they ask about.")] = 10_000,
    zipf: Annotated[float, typer.Option(help="Exponent of the documents' popularity; 0: all alike.")] = 0.9,
    document_tokens: Annotated[int, typer.Option(help="Length of each document.")] = 4096,
    question_tokens: Annotated[int, typer.Option(help="Tokens after it.")] = 32,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a simulated block; a trace's have 512.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn: the same gives the same.")] = 0,
    vary: Annotated[
        str | None, typer.Option(help="One setting in several values, such as edge.capacity_gb=10,100,1000: a row for each.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="For --check: checkpoint folder, hub id or alias.")
    ] = "smollm2-135m",
    method: Annotated[
        str, typer.Option(help="events: every prompt; window: some, with caches in their steady state; auto: by their number.")
    ] = "auto",
    window: Annotated[int, typer.Option(help="Prompts of a window.")] = 200_000,
    prices: Annotated[Path | None, typer.Option(help="TOML file with prices of your own, as for kvcdn economics.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the times to the first token to this .png or .svg file.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Renew tables and plots of this document, docs/simulation.md, from --trace; or its table of --check."
        ),
    ] = None,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Run a small case really, on this machine, and simulated, and tell the difference.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate traffic on a topology, with kvcdn and without: hits, egress, time to first token, cost of a million tokens.

    Caches evict and clients plan by the code that edges and clients run. Nothing is measured on this machine, but with --check.
    """
    if check:
        refuse_others(ctx, "check", {"model", "report", "as_json"})
        _check(model, report, as_json=as_json)
        return
    if report is not None:
        refuse_others(ctx, "report", {"trace"})
        _renew(report, trace)
        return
    from kvcdn.cli.simulate_parts import REAL  # noqa: PLC0415
    from kvcdn.cli.small_file import read_text  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.economics.pricebook import PriceBook  # noqa: PLC0415
    from kvcdn.simulation.comparison import compare  # noqa: PLC0415
    from kvcdn.simulation.workload import Zipf  # noqa: PLC0415

    book = PriceBook.presets()
    if prices is not None:
        book = book.with_toml(read_text(prices), str(prices))
    drawn = Zipf(
        requests=readers,
        seconds=days * 86400,
        documents=documents,
        exponent=zipf,
        document_tokens=document_tokens,
        question_tokens=question_tokens,
        block_tokens=block_tokens,
    )
    rows = []
    for label, varied in _variants(_topology(topology), vary):
        traffic = _traffic(trace, drawn, varied, rate, seed)
        rows.append({"set": label, **compare(varied, traffic, book, REAL, ticking(), method=method, window=window)})
    result = {"topology": topology, "traffic": traffic.name, "seed": seed, "vary": vary, "runs": rows}
    if plot is not None:
        from kvcdn.cli.simulate_plot import draw  # noqa: PLC0415

        draw(result, plot)
        note(f"a plot is in {plot}")
    if as_json:
        print_json(result)
        return
    _show(result)


def _check(model: str, report: Path | None, *, as_json: bool) -> None:
    from kvcdn.cli.simulate_check import CheckCase, check  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.cli.simulate_report import CHECK_RECORD, check_sections  # noqa: PLC0415
    from kvcdn.cli.small_file import read_text  # noqa: PLC0415
    from kvcdn.economics.report import fill  # noqa: PLC0415

    text = "" if report is None else read_text(report)
    found = check(model, CheckCase(), note)
    if report is not None:
        report.write_text(fill(text, check_sections(found), others=True), "utf-8")
        report.with_name(CHECK_RECORD).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if as_json:
        print_json(found)
        return
    rows = [
        [
            name,
            f"{row['real_s']:.3f} s",
            f"{row['slowest_s']:.3f} s",
            f"{row['rounds_apart']:+.1%}",
            f"{row['simulated_s']:.3f} s",
            f"{row['error']:+.1%}",
        ]
        for name, row in found["fetch"].items()
    ]
    print_table(["FETCH", "REAL", "SLOWEST ROUND", "A ROUND IS OFF BY", "SIMULATED", "ERROR"], rows)
    alone, told = found["alone"], "beside its bytes, {:.3f} s of them round trips"
    print_text(f"\na hit alone: {alone['hit_s']:.3f} s {told.format(alone['round_trips_of_a_hit_s'])}")
    print_text(f"a miss alone: {alone['miss_s']:.3f} s more {told.format(alone['round_trips_of_a_miss_s'])}")
    hits, filled = found["hit_ratio"], found["filled_bytes"]
    print_text(f"hits of the edge, by bytes: {hits['real']:.1%} really, {hits['simulated']:.1%} simulated")
    print_text(f"filled by the edge: {size(filled['real'])} really, {size(filled['simulated'])} simulated")


def _renew(document: Path, folder: Path | None) -> None:
    from kvcdn.cli.simulate_plot import draw  # noqa: PLC0415
    from kvcdn.cli.simulate_report import RECORD, Recording, plot_runs, sections  # noqa: PLC0415
    from kvcdn.cli.small_file import read_text  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.economics.report import fill  # noqa: PLC0415

    if folder is None:
        raise UsageError(
            "--report needs the folder of the traces", hint="kvcdn simulate --report docs/simulation.md --trace FOLDER"
        )
    tell = ticking()
    runs = Recording(folder, tell)
    document.write_text(fill(read_text(document), sections(runs, tell), others=True), "utf-8")
    document.with_name(RECORD).write_text(runs.to_json(), "utf-8")
    for name, result in plot_runs(folder, tell).items():
        draw(result, document.with_name(name))
    note(f"{document}: tables and plots renewed, and {RECORD} beside it")


def _topology(name: str) -> Topology:
    from kvcdn.cli.small_file import read_text  # noqa: PLC0415
    from kvcdn.economics.checks import known  # noqa: PLC0415
    from kvcdn.simulation.presets import PRESETS  # noqa: PLC0415
    from kvcdn.simulation.topology import read_topology  # noqa: PLC0415

    if name.endswith(".toml") or "/" in name:
        return read_topology(read_text(Path(name)), name)
    return known("topology", name, PRESETS)


def _variants(topology: Topology, vary: str | None) -> list[tuple[str, Topology]]:
    if vary is None:
        return [("", topology)]
    key, equals, values = vary.partition("=")
    listed = [value.strip() for value in values.split(",")]
    if not equals or not all(listed) or len(set(listed)) != len(listed):
        raise UsageError(f"--vary {vary} names no values", hint="as in --vary edge.capacity_gb=10,100,1000")
    return [(f"{key.strip()}={value}", topology.varied(key.strip(), value)) for value in listed]


def _traffic(trace: Path | None, drawn: Any, topology: Topology, rate: float, seed: int) -> Traffic:
    from kvcdn.cli.trace_file import trace_lines  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.simulation.comparison import Traffic  # noqa: PLC0415
    from kvcdn.simulation.workload import read_requests  # noqa: PLC0415

    if trace is None:
        law = f"{drawn.documents:,} documents, Zipf {drawn.exponent:g}, in {drawn.seconds / 86400:g} days"
        return Traffic(f"{drawn.requests:,.0f} readers of {law}", zipf=drawn, seed=seed)
    shares = [edge.share for edge in topology.edges]
    with trace_lines(trace) as lines:
        requests = read_requests(lines, str(trace), shares, rate, seed)
    name = trace.name.removesuffix(".gz").removesuffix(".jsonl")
    return Traffic(name if rate == 1 else f"{name}, {rate:g} times as fast", trace=tuple(requests), seed=seed)


def _show(result: dict[str, Any]) -> None:
    from kvcdn.economics.verdict import seconds, usd  # noqa: PLC0415 - see kvcdn.cli

    print_text(f"{result['traffic']}, over {result['topology']}\n")
    if any(run["method"] == "window" for run in result["runs"]):
        print_text(f"{result['runs'][0]['with']['simulated']:,} prompts simulated, caches by Che's approximation\n")
    rows = []
    for run in result["runs"]:
        for name in ("without", "with"):
            found = run[name]
            times = found["first_token_s"]
            rows.append(
                [
                    run["set"],
                    name,
                    *(seconds(times[key]) if times[key] is not None else "never" for key in ("p50", "p90", "p99")),
                    f"{found['tokens_share']['memory']:.1%}",
                    f"{found['tokens_share']['fetched']:.1%}",
                    f"{found['tokens_share']['computed']:.1%}",
                    size(found["origin"]["sent_bytes"]),
                    usd(found["usd"]),
                    usd(found["usd_per_million_tokens"]) if found["usd_per_million_tokens"] is not None else "-",
                ]
            )
    headings = [
        "SET",
        "KVCDN",
        "TTFT P50",
        "P90",
        "P99",
        "IN MEMORY",
        "FETCHED",
        "COMPUTED",
        "ORIGIN SENT",
        "COST",
        "A MILLION",
    ]
    print_table(headings if result["vary"] else headings[1:], rows if result["vary"] else [row[1:] for row in rows])
    for run in result["runs"]:
        _show_nodes(run)


def _show_nodes(run: dict[str, Any]) -> None:
    found = run["with"]
    print_text("")
    print_table(
        [run["set"] or "CACHE", "ASKED FOR", "HITS", "FILLED", "SENT"],
        [
            [
                name,
                size(node["asked_bytes"]),
                "-" if node["hit_ratio"] is None else f"{node['hit_ratio']:.1%}",
                size(node["filled_bytes"]),
                size(node["sent_bytes"]),
            ]
            for name, node in found["nodes"].items()
        ],
    )
    ways = ", ".join(f"{count:,.0f} {name}" for name, count in sorted(found["ways"].items()))
    print_text(f"\nprompts by way: {ways}; {found['turned']:,.0f} fetches were joined by computing")
    for name in ("without", "with"):
        devices = run[name]["devices"]
        if devices["utilisation"] is not None:
            print_text(
                f"devices {name} kvcdn: {devices['utilisation']:.1%} busy, a prompt waits {devices['mean_wait_s']:.2f} s"
            )
    if any(run[name]["unfinished"] for name in ("without", "with")):
        print_text(f"without a first token at the end: {run['without']['unfinished']:,}, with kvcdn {found['unfinished']:,}")
