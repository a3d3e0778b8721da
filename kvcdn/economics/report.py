"""The tables of docs/economics.md: computed from the presets, and put between the document's markers.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`; everything else in the document is left alone.
`kvcdn economics --report docs/economics.md` renews it; a test holds that the committed document is what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvcdn.economics import paper
from kvcdn.economics.case import Case, Speed
from kvcdn.economics.costs import compare, months_that_eat_the_saving, shortest_cadence_days
from kvcdn.economics.devices import DEVICES, LINKS, UTILISATION
from kvcdn.economics.models import MODELS
from kvcdn.economics.precisions import PRECISIONS
from kvcdn.economics.prices import DELIVERIES, STORES, TARIFFS
from kvcdn.economics.thresholds import break_even_link, cheaper_from, faster_from, simple_link
from kvcdn.economics.verdict import bits, seconds, span, usd
from kvcdn.errors import UsageError

TOKENS = 32_768
"""Length of the document, where a table is about one length."""

READS = 1000.0

_MODELS = (
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-32b",
    "llama-3.1-70b",
    "qwen3-30b-a3b",
    "glm-4.6",
    "gemma-3-27b",
    "gpt-oss-120b",
    "llama-4-scout",
    "qwen3.6-27b",
    "qwen3.6-35b-a3b",
    "deepseek-v3",
    "deepseek-v3-expanded",
    "deepseek-v3.2",
)

PLOTS: Mapping[str, tuple[str, str, str]] = {
    "economics-h100.svg": ("llama-3.1-70b", "h100", "region"),
    "economics-laptop.svg": ("qwen3-4b", "m1-pro", "home"),
}
"""Break-even maps beside the document: of a model, on a device, with a link marked."""

_SMALL = ("smollm2-135m", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "gemma-3-4b")
"""Models for machines without a server GPU."""


def case(model: str, device: str = "h100", link: str = "region", *, precision: str = "bf16", tokens: int = TOKENS) -> Case:
    """The case of one cell: presets, as few devices as hold the weights, and the defaults of `Case` else."""
    unit = DEVICES[device]
    speed = Speed.of_device(unit, unit.count_for(MODELS[model]), UTILISATION)
    return Case(
        model=MODELS[model],
        precision=PRECISIONS[precision],
        speed=speed,
        store=STORES["s3"],
        delivery=DELIVERIES["bunny-volume"],
        zero_egress=STORES["r2"],
        tariff=TARIFFS["claude-sonnet-4-6"],
        link=LINKS[link],
        tokens=tokens,
        reads=READS,
    )


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [list(headings), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _count(value: float | None) -> str:
    return "**never**" if value is None else f"{value:,.0f}"


def _paper() -> str:
    rows = [
        [row.changed, usd(row.reprefill_usd), usd(row.reuse_usd), f"{row.ratio:.3g} x", "yes" if row.pays else "**do not**"]
        for row in [paper.original(), *paper.corrections()]
        if "high" not in row.changed and "AWS" not in row.changed
    ]
    return table(["assumed", "prefill", "reuse", "ratio", "pays"], rows)


def _sensitivity() -> str:
    rows = [
        [entry["assumption"], entry["instead"], f"{entry['ratio']:.2g} x", f"{entry['ratio_moves_by']:,.0f} x"]
        for entry in paper.sensitivity()
    ]
    return table(["the paper assumes", "in its place", "ratio becomes", "moves by"], rows)


def _needs() -> str:
    rows = []
    for name in _MODELS:
        at = case(name)
        rows.append(
            [
                name,
                at.model.kind,
                f"{at.raw_bytes / at.tokens:,.0f}",
                f"{DEVICES['h100'].count_for(at.model)}",
                f"{at.tokens / at.prefill_s:,.0f}",
                bits(simple_link(at)),
                f"{at.raw_bytes / at.prefill_s / 1e9:.3g} GB/s",
            ]
        )
    headings = ["model", "kind", "KV bytes a token", "H100s", "prefill tokens/s", "link needed", "opening needed"]
    return table(headings, rows)


def _devices_need() -> str:
    devices = ("rtx-4090", "l40s", "a100", "m1-pro", "cpu-2-cores")
    rows = [[name, *(_needed(name, device) for device in devices)] for name in _SMALL]
    return table(["model", *devices], rows)


def _needed(model: str, device: str) -> str:
    found = break_even_link(case(model, device, "office", tokens=3774))
    return "**none**" if found is None else bits(found)


def _faster(device: str, models: Iterable[str]) -> str:
    rows = [[name, *(_count(faster_from(case(name, device, link))) for link in LINKS)] for name in models]
    return table(["model", *LINKS], rows)


def _cheaper() -> str:
    rows = []
    for name in _MODELS:
        at = case(name)
        own = replace(at, delivery=DELIVERIES["own"], hit_ratio=0.99)
        near = replace(at, store=STORES["s3-in-region"])
        pieces = replace(at, request_bytes=float(paper.PIECE_BYTES))
        cells = [
            cheaper_from(at, "gpu", "origin"),
            cheaper_from(at, "gpu", "edges"),
            cheaper_from(own, "gpu", "edges"),
            cheaper_from(near, "gpu", "origin"),
            cheaper_from(pieces, "gpu", "zero-egress"),
            cheaper_from(at, "gpu", "zero-egress"),
        ]
        rows.append([name, *map(_count, cells)])
    headings = [
        "model",
        "S3, internet",
        "Bunny volume edges, 90 % hits",
        "own edges, 99 % hits",
        "S3, same region",
        "R2, pieces of 1 MiB",
        "R2",
    ]
    return table(headings, rows)


def _reads() -> str:
    rows = []
    for name in _MODELS:
        at = case(name)
        found = compare(at, "gpu", "zero-egress")
        months = months_that_eat_the_saving(at, "gpu", "zero-egress")
        rows.append(
            [
                name,
                usd(found.read_without),
                usd(found.read_with),
                usd(found.publish),
                usd(found.storage / at.months),
                _count(found.break_even_reads),
                "**at once**" if months is None else f"{months:,.3g}",
            ]
        )
    headings = [
        "model",
        "a read by prefill",
        "a read by R2",
        "publishing",
        "a month stored",
        "reads a month to break even",
        "months of storage that 1,000 reads pay",
    ]
    return table(headings, rows)


def _cadence() -> str:
    daily = (0.1, 1.0, 10.0, 100.0, 1000.0)
    rows = []
    for name in _MODELS:
        at = replace(case(name), days=1.0)
        found = [shortest_cadence_days(replace(at, reads=reads), "gpu", "zero-egress") for reads in daily]
        rows.append([name, *("**never**" if days is None else span(days) for days in found)])
    return table(["model", *(f"{reads:g} reads a day" for reads in daily)], rows)


def _precision() -> str:
    rows = []
    for name in PRECISIONS:
        at = case("llama-3.1-70b", precision=name)
        found = compare(at, "gpu", "edges")
        rows.append(
            [
                name,
                f"{at.precision.ratio:.2f}",
                f"{at.stored_gb:.3g} GB",
                bits(simple_link(at)),
                usd(found.read_with),
                usd(compare(at, "gpu", "origin").read_with),
            ]
        )
    headings = [
        "precision",
        "of 16 bits",
        "stored",
        "link needed",
        "a read, Bunny volume edges",
        "a read, S3 over the internet",
    ]
    return table(headings, rows)


def _first_token() -> str:
    pairs = (
        ("smollm2-135m", "cpu-2-cores"),
        ("qwen3-4b", "m1-pro"),
        ("qwen3-8b", "rtx-4090"),
        ("llama-3.1-70b", "h100"),
        ("deepseek-v3", "h100"),
    )
    rows = []
    for name, device in pairs:
        at = case(name, device, tokens=8192)
        fetched = [replace(at, link=link).hit_s for link in LINKS.values()]
        cells = [f"{seconds(value)}" if value < at.miss_s else f"**{seconds(value)}**" for value in fetched]
        rows.append([name, device, seconds(at.miss_s), *cells])
    return table(["model", "on", "prefill", *LINKS], rows)


def _prices() -> str:
    def price(value: float) -> str:
        return f"{value:g}"

    rows = [
        [f"`{s.name}`", price(s.storage_usd_per_gb_month), price(s.read_usd_per_1000), price(s.write_usd_per_1000),
         price(s.egress_usd_per_gb), s.source, s.date]
        for s in STORES.values()
    ]  # fmt: skip
    rows += [[f"`{d.name}`", "", "", "", price(d.egress_usd_per_gb), d.source, d.date] for d in DELIVERIES.values()]
    return table(["preset", "GB-month", "1,000 reads", "1,000 writes", "GB out", "source", "seen"], rows)


def _tariffs() -> str:
    rows = []
    for t in TARIFFS.values():
        full, cached = t.input_usd_per_million, t.cached_usd_per_million
        rows.append([f"`{t.name}`", f"{full:g}", f"{cached:g}", f"{cached / full:.2f}", t.source, t.date])
    return table(["preset", "input, $/M", "cached read, $/M", "ratio", "source", "seen"], rows)


def _devices() -> str:
    rows = []
    for unit in DEVICES.values():
        flops = f"{unit.sustained_flops(UTILISATION) / 1e12:.3g}"
        memory = f"{unit.memory_bytes_per_s / 1e12:.3g}" if unit.memory_bytes_per_s else "not limiting"
        price = f"{unit.usd_per_hour:g}"
        rows.append([f"`{unit.name}`", flops, memory, price, unit.source, f"{unit.price_source}, {unit.date}"])
    return table(["preset", "TFLOP/s sustained", "memory, TB/s", "$/h", "speed from", "price from"], rows)


def _models() -> str:
    rows = []
    for model in MODELS.values():
        first, later = model.kv_bytes(1) - model.state_bytes, model.kv_bytes(1_000_001) - model.kv_bytes(1_000_000)
        grows = f"{first:,.0f}" + (f", then {later:,.0f}" if later != first else "")
        grows += f", and {model.state_bytes / 1e6:.3g} MB of state" if model.state_bytes else ""
        size = f"{model.parameters / 1e9:.4g}" + (
            f" ({model.active / 1e9:.3g} active)" if model.active < model.parameters else ""
        )
        rows.append([f"`{model.name}`", model.kind, size, grows, model.source.partition("; ")[2]])
    return table(["preset", "kind", "parameters, 10^9", "KV bytes a token", "parameters from"], rows)


SECTIONS: Mapping[str, Callable[[], str]] = {
    "paper": _paper,
    "sensitivity": _sensitivity,
    "first-token": _first_token,
    "needs": _needs,
    "devices-need": _devices_need,
    "faster-h100": lambda: _faster("h100", _MODELS),
    "faster-rtx-4090": lambda: _faster("rtx-4090", _SMALL),
    "faster-m1-pro": lambda: _faster("m1-pro", _SMALL),
    "cheaper": _cheaper,
    "reads": _reads,
    "cadence": _cadence,
    "precision": _precision,
    "prices": _prices,
    "tariffs": _tariffs,
    "devices": _devices,
    "models": _models,
}

_MARKED = re.compile(r"(?<=^<!-- table: )([a-z0-9-]+)( -->\n).*?(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def fill(text: str, sections: Mapping[str, Callable[[], str]] = SECTIONS, *, others: bool = False) -> str:
    """`text` with the table of every marker made anew; with `others`, tables that are none of `sections` stay as they are.

    Raises UsageError for a marker that names no table, or none at all.
    """

    def made(match: re.Match[str]) -> str:
        if others and match[1] not in sections:
            return match[0]
        if match[1] not in sections:
            raise UsageError(f"the document asks for a table {match[1]!r}", hint=f"known: {', '.join(sections)}")
        return f"{match[1]}{match[2]}\n{sections[match[1]]()}\n\n"

    renewed, count = _MARKED.subn(made, text)
    if not count:
        raise UsageError(
            "the document has no marker of a table", hint="a table stands between <!-- table: NAME --> and <!-- end -->"
        )
    return renewed
