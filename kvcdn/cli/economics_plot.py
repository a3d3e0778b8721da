"""The break-even map of `kvcdn economics --plot`: over document length, which link it takes, and what a GB may cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcdn.economics.case import GB
from kvcdn.economics.costs import per_read_without
from kvcdn.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from kvcdn.economics.case import Case

_FORMATS = (".png", ".svg")

_LENGTHS = [round(2 ** (step / 4)) for step in range(4 * 7, 4 * 20 + 1)]
"""128 to 1,048,576 tokens, four an octave."""

_LINKS = [10 ** (6 + step / 8) for step in range(8 * 5 + 1)]
"""8 Mbit/s to 800 Gbit/s, in bytes a second."""

_EGRESS = [10 ** (-5 + step / 8) for step in range(8 * 5 + 1)]
"""0.00001 to 1 USD a GB."""

_BANDS = [0.0, 0.1, 0.5, 1.0, 2.0, 10.0, 1e9]
"""How many times sooner, or cheaper: below 1, reuse loses."""

_COLOURS = ["#b2182b", "#ef8a62", "#fddbc7", "#d1e5f0", "#67a9cf", "#2166ac"]


def draw(case: Case, path: Path) -> None:
    """Writes the map to `path`, a .png or .svg file. Raises UsageError without matplotlib, UnavailableError for a bad disk."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot writes {' or '.join(_FORMATS)} files, not {path.name!r}")
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an optional extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UsageError("--plot needs matplotlib, which is not installed", hint="pip install 'kvcdn[plot]'") from None
    # The same file at each run, its words as words: smaller, and to be searched.
    mpl.rcParams.update({"svg.hashsalt": "kvcdn", "svg.fonttype": "none"})
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    style = {"levels": _BANDS, "colors": _COLOURS}
    filled = left.contourf(_LENGTHS, [8 * link / 1e6 for link in _LINKS], speedups(case), **style)
    left.set(title="First token: how many times sooner than prefilling", ylabel="link, Mbit/s")
    left.plot([case.tokens], [8 * case.link.bytes_per_s / 1e6], "k*", markersize=12)
    right.contourf(_LENGTHS, _EGRESS, savings(case), **style)
    right.set(title="A read: how many times cheaper than prefilling", ylabel="USD a GB delivered")
    right.axhline(case.store.egress_usd_per_gb or _EGRESS[0], color="black", linestyle="--", label=f"{case.store.name}")
    right.legend()
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="document, tokens")
    bar = figure.colorbar(filled, ax=[left, right], ticks=_BANDS[:-1])
    bar.set_label("below 1: do not")
    figure.suptitle(f"{case.model.name}, {case.precision.name}, {case.speed.source}", fontsize=10)
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error}") from None


def speedups(case: Case) -> list[list[float]]:
    """Prefilling's time to the first token over reuse's: a row for each link, a column for each length."""
    lengths = [replace(case, tokens=tokens) for tokens in _LENGTHS]
    return [[at.miss_s / _hit_s(at, link) for at in lengths] for link in _LINKS]


def _hit_s(case: Case, bytes_per_s: float) -> float:
    return case.overhead_s + max(case.stored_bytes / bytes_per_s, case.open_s, case.turns_s) + case.question_s


def savings(case: Case) -> list[list[float]]:
    """Prefilling's price of a read over reuse's, by price of a GB and length; requests and the question's compute included."""
    rows = []
    lengths = [replace(case, tokens=tokens) for tokens in _LENGTHS]
    fixed = [at.question_s * at.speed.usd_per_s + (at.ranges + 1) * at.store.read_usd_per_1000 / 1000 for at in lengths]
    for price in _EGRESS:
        reuse = [base + at.stored_bytes / GB * price for base, at in zip(fixed, lengths, strict=True)]
        rows.append([per_read_without(at)["gpu"] / usd for at, usd in zip(lengths, reuse, strict=True)])
    return rows
