"""The rate-distortion plot of `kvcdn bench codec --plot`: how far each codec is from exact, over what it takes of raw KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcdn.cli.figure import new_figure, write_figure
from kvcdn.keys import TRANSFORMED

_COLOURS = ["#2166ac", "#b2182b", "#1b7837", "#762a83", "#e08214", "#4d4d4d"]
"""One for each document, in turn."""

_MARKERS = {
    "int8 over whole tensors": "x",
    "int8": "s",
    "int4": "D",
    "tc-high": "^",
    "tc-medium": "o",
    "tc-low": "v",
    "tc-least": "<",
}
"""Of the lossy codecs, from the largest."""

_CURVE = TRANSFORMED

_EXACT = {"lossless": "lossless", "zstd over raw bytes": "zstd", "safetensors (raw)": "raw"}


def draw_codecs(rows: Sequence[dict[str, Any]], published: Sequence[dict[str, str]], path: Path) -> None:
    """Writes the plot of `rows`, as `kvcdn bench codec --json` has them, to `path`. Raises UsageError, UnavailableError.

    Figures that others published stand below it as such: they are of other models, in other measures, and have no place in it.
    """
    figure = new_figure(path, (9, 6))
    axes = figure.subplots()
    documents = list(dict.fromkeys(row["document"] for row in rows))
    for document, colour in zip(documents, _COLOURS * len(documents), strict=False):
        mine = {row["codec"]: row for row in rows if row["document"] == document}
        points = {name: place for name, row in mine.items() if name in _MARKERS and (place := _place(row))}
        curve = sorted(points[name] for name in _CURVE if name in points)
        axes.plot([x for x, _ in curve], [y for _, y in curve], color=colour, linewidth=1, label=document)
        for name, (x, y) in points.items():
            axes.plot([x], [y], _MARKERS[name], color=colour, markersize=7)
    for name, short in _EXACT.items():
        ratios = [row["ratio"] for row in rows if row["codec"] == name]
        if ratios:
            axes.axvline(max(ratios), color="grey", linestyle=":", linewidth=1)
            axes.text(max(ratios), 0.02, f" {short}, exact", rotation=90, transform=axes.get_xaxis_transform(), fontsize=8)
    axes.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    axes.text(1.0, 1.03, "recomputing", ha="right", transform=axes.get_yaxis_transform(), fontsize=8)
    for name, marker in _MARKERS.items():
        axes.plot([], [], marker, color="black", label=name)
    axes.set(yscale="log", xlim=(0, 1.05), xlabel="stored bytes over raw 16-bit KV, everything counted")
    axes.set(ylabel="mean KL from exact, times that of recomputing", title="Bytes against distance from exact KV")
    axes.legend(loc="upper right", fontsize=8)
    notes = "\n".join(f"as published, other models and measures: {one['codec']}, {one['published']}" for one in published)
    figure.supxlabel(notes, fontsize=7)
    write_figure(figure, path)


def _place(row: dict[str, Any]) -> tuple[float, float] | None:
    """Ratio, and divergence over that of recomputing; None where recomputing is at no distance."""
    return (row["ratio"], row["kl"] / row["kl_recompute"]) if row.get("kl_recompute") and row["kl"] else None
