"""`kvcdn economics`: whether it pays, for one's own model, prices, link and traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcdn.cli.options import AsJson, refuse_others
from kvcdn.cli.output import link as shown_link
from kvcdn.cli.output import note, print_json, print_pairs, print_table, print_text, size
from kvcdn.errors import UsageError

if TYPE_CHECKING:
    from kvcdn.economics.case import Case


def economics(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A known model, a hub id, or a folder with a config.json.", show_default="qwen3-4b"),
    ] = None,
    kv_bytes_per_token: Annotated[
        float | None,
        typer.Option(help="Raw KV of one token, in place of the model's (then all layers are taken as full attention)."),
    ] = None,
    parameters: Annotated[float | None, typer.Option(help="Active parameters, for a model that is not known.")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the document.")] = 3774,
    question_tokens: Annotated[int, typer.Option(help="Tokens after it, computed in any case.")] = 32,
    reads: Annotated[float, typer.Option(help="Reads of the document in --days, all together.")] = 1000,
    days: Annotated[float, typer.Option(help="How long it is kept and read.")] = 30,
    retrain_days: Annotated[float | None, typer.Option(help="A new version of the model every so many days.")] = None,
    precision: Annotated[
        str, typer.Option(help="How KV is stored: bf16, fp16 (lossless), raw, int8, int4, tc-high to tc-least.")
    ] = "bf16",
    stored_ratio: Annotated[float | None, typer.Option(help="Stored over raw bytes, in place of the precision's.")] = None,
    device: Annotated[str, typer.Option(help="What prefills: h100, h200, a100, l40s, rtx-4090, m1-pro, cpu-2-cores.")] = "h100",
    devices: Annotated[int | None, typer.Option(help="How many share a pass. Default: as few as hold the weights.")] = None,
    utilisation: Annotated[float, typer.Option(help="Share of a device's peak that prefill reaches: an assumption.")] = 0.4,
    prefill_rate: Annotated[
        float | None, typer.Option(help="Prefill tokens a second at --tokens, in place of the device's.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="JSON of kvcdn publish --dry-run or kvcdn bench ttft: rate, ratio and size as measured.")
    ] = None,
    gpu_hour: Annotated[float | None, typer.Option(help="USD an hour of one device.")] = None,
    store: Annotated[str, typer.Option(help="Storage prices: s3, s3-in-region, r2, b2.")] = "s3",
    storage_usd: Annotated[float | None, typer.Option(help="USD a GB and month stored.")] = None,
    request_usd: Annotated[float | None, typer.Option(help="USD a thousand reads from the store.")] = None,
    write_usd: Annotated[float | None, typer.Option(help="USD a thousand writes to the store.")] = None,
    egress_usd: Annotated[float | None, typer.Option(help="USD a GB out of the store.")] = None,
    zero_egress: Annotated[str, typer.Option(help="The store that charges nothing for traffic, to compare with.")] = "r2",
    delivery: Annotated[str, typer.Option(help="Edge prices: cloudfront, bunny, bunny-volume, fastly, own.")] = "bunny",
    edge_usd: Annotated[float | None, typer.Option(help="USD a GB from an edge.")] = None,
    hit_ratio: Annotated[float, typer.Option(help="Share of reads that edges answer by themselves.")] = 0.9,
    tariff: Annotated[
        str, typer.Option(help="API tariff to compare with, such as claude-sonnet-4-6; genai:MODEL: from genai-prices.")
    ] = "claude-sonnet-4-6",
    input_usd: Annotated[float | None, typer.Option(help="USD a million input tokens of the API.")] = None,
    cached_usd: Annotated[float | None, typer.Option(help="USD a million cached tokens of the API.")] = None,
    link: Annotated[
        str, typer.Option(help="rack, region, office, overseas, home, mobile; or a speed: 300Mbit/s, 2.5GB/s.")
    ] = "office",
    rtt: Annotated[float | None, typer.Option(help="Seconds of one round trip.")] = None,
    open_rate: Annotated[
        float, typer.Option(help="Raw KV bytes a second that the reader verifies, decrypts and decodes.")
    ] = 2.4e9,
    request_bytes: Annotated[float, typer.Option(help="Bytes that one request to the store fetches at most.")] = 8 << 20,
    prices: Annotated[
        Path | None, typer.Option(help="TOML file with prices of your own; infra/prices.toml is a sample.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A published case: paper.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a break-even map to this .png or .svg file.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Renew the generated tables of this document, such as docs/economics.md.")
    ] = None,
    *,
    gpu_waits: Annotated[
        bool, typer.Option("--gpu-waits", help="The device stands idle, paid, while a cache arrives.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether delivering a KV cache pays: money, time, break-even points, and every assumption behind them.

    Nothing is measured here. Prices are dated presets, or yours; --json shows each with its source.
    """
    if preset is not None or report is not None:
        refuse_others(ctx, "preset" if preset is not None else "report", {"as_json"})
        _show_preset(preset, as_json=as_json) if preset is not None else _renew(report, as_json=as_json)
        return
    from kvcdn.cli.economics_case import case_of  # noqa: PLC0415 - see kvcdn.cli

    case = case_of(ctx.params)
    if plot is not None:
        from kvcdn.cli.economics_plot import draw  # noqa: PLC0415

        draw(case, plot)
        note(f"a break-even map is in {plot}")
    _show(case, as_json=as_json)


def _renew(path: Path | None, *, as_json: bool) -> None:
    from kvcdn.cli.economics_plot import draw  # noqa: PLC0415
    from kvcdn.cli.small_file import read_text  # noqa: PLC0415
    from kvcdn.economics.report import PLOTS, SECTIONS, case, fill  # noqa: PLC0415 - see kvcdn.cli

    if path is None:
        return
    text = read_text(path)
    renewed = fill(text)
    if renewed != text:
        path.write_text(renewed, "utf-8")
    for name, (model, device, link) in PLOTS.items():
        if f"({name})" in text:
            draw(case(model, device, link), path.with_name(name))
    if as_json:
        print_json({"report": str(path), "changed": renewed != text, "tables": list(SECTIONS)})
    else:
        note(f"{path}: {'renewed' if renewed != text else 'as it was'}")


def _show_preset(name: str, *, as_json: bool) -> None:
    from kvcdn.economics import paper  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.economics.verdict import usd  # noqa: PLC0415

    if name != "paper":
        raise UsageError(f"no preset {name!r}", hint="known: paper")
    if as_json:
        print_json(paper.to_json())
        return
    base = paper.original()
    print_text(f"{paper.SOURCE}: {usd(base.reprefill_usd)} to prefill, {usd(base.reuse_usd)} to reuse, {base.ratio:.1f} x\n")
    rows = [[entry["assumption"], entry["instead"], f"{entry['ratio']:.3g} x"] for entry in paper.sensitivity()]
    print_table(["ASSUMED", "IN ITS PLACE", "RATIO"], rows)
    print_text("")
    rows = [
        [usd(row.reprefill_usd), usd(row.reuse_usd), f"{row.ratio:.3g} x", "yes" if row.pays else "do not", row.changed]
        for row in [base, *paper.corrections()]
    ]
    print_table(["PREFILL", "REUSE", "RATIO", "PAYS", "WITH"], rows)


def _show(case: Case, *, as_json: bool) -> None:
    from kvcdn.economics import verdict  # noqa: PLC0415 - see kvcdn.cli

    found = verdict.to_json(case)
    if as_json:
        print_json(found)
        return
    print_pairs(_summary(case, found))
    print_text("")
    usd = verdict.usd
    print_table(
        ["IN PLACE OF", "DELIVERED BY", "A READ", "BEFORE", "ALL READS", "BEFORE", "PAYS", "FROM READS", "FROM TOKENS"],
        [
            [
                row["without"],
                row["with"],
                usd(row["read_with_usd"]),
                usd(row["read_without_usd"]),
                usd(row["total_with_usd"]),
                usd(row["total_without_usd"]),
                "yes" if row["pays"] else "do not",
                _or_never(row["break_even_reads"]),
                _or_never(found["break_even"]["tokens_cheaper"][row["without"]][row["with"]]),
            ]
            for row in found["costs"]
        ],
    )
    print_text("")
    for text in found["verdict"].values():
        print_text(f"- {text}")
    print_text("\nEvery figure hangs on assumptions: --json lists each with its source.")


def _summary(case: Case, found: dict[str, Any]) -> list[tuple[str, str]]:
    from kvcdn.economics.verdict import seconds, span, usd  # noqa: PLC0415 - see kvcdn.cli

    needed, best = found["break_even"]["link_bytes_per_s"], _best(found)
    months, cadence = best["storage_months_that_eat_the_saving"], best["shortest_retrain_days"]
    traffic = f"{case.reads:,.0f} reads in {case.days:g} days"
    return [
        ("model", f"{case.model.name}, {case.model.kind}"),
        (
            "document",
            f"{case.tokens:,} tokens, {size(case.raw_bytes)} of KV, {size(case.stored_bytes)} stored ({case.precision.name})",
        ),
        ("traffic", traffic + (f", a new model every {case.retrain_days:g} days" if case.retrain_days else "")),
        ("prefill", f"{case.tokens / case.prefill_s:,.0f} tokens/s, {case.speed.source}, {usd(case.speed.usd_per_hour)}/h"),
        ("link", f"{shown_link(case.link.bytes_per_s)}, {seconds(case.link.round_trip_s)} a round trip"),
        ("first token", f"{seconds(case.miss_s)} by prefilling, {seconds(case.hit_s)} by fetching"),
        ("faster from", _or_never(found["break_even"]["tokens_faster"], "{:,} tokens on this link", "never on this link")),
        ("link needed", "none is fast enough" if needed is None else shown_link(needed)),
        (
            "storage eats it",
            f"{best['with']} against {best['without']}: " + _or_never(months, "after {:,.3g} months", "at once"),
        ),
        (
            "new model",
            f"{best['with']} against {best['without']}: " + "never pays"
            if cadence is None
            else f"pays where {span(cadence)} or more apart",
        ),
    ]


def _best(found: dict[str, Any]) -> dict[str, Any]:
    """The cheapest way against one's own device."""
    own: list[dict[str, Any]] = [row for row in found["costs"] if row["without"] == "gpu"]
    return min(own, key=lambda row: float(row["total_with_usd"]))


def _or_never(value: float | None, form: str = "{:,}", never: str = "never") -> str:
    return never if value is None else form.format(value)
