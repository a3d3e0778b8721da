"""Plots of benchmarks, as SVG: first token by link speed, and rate against distortion of the codecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvcdn.cli.figure import new_figure, write_figure

Result = Mapping[str, Any]

_EXACT = 1e-2
"""Where a divergence of 0 is drawn, on an axis of multiples of the noise that has no 0."""


def draw_crossover(result: Result, path: Path) -> None:
    """Prefill, fetch and auto by link speed."""
    rows = sorted(result["rows"], key=lambda row: row["mbit"])
    figure, axes = _figure(f"{result['tokens']:,} tokens, {result.get('machine', {}).get('model', '')}", path)
    for name, style in (("prefill", "s--"), ("fetch", "o--"), ("auto", "^-")):
        axes.plot([row["mbit"] for row in rows], [row[f"{name}_s"] for row in rows], style, label=name)
    axes.axvline(result["crossover_mbit"], color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="time to first token, s")
    axes.legend()
    write_figure(figure, path)


def draw_codecs(result: Result, path: Path) -> None:
    """Divergence over bytes, a line a document."""
    figure, axes = _figure("mean KL over tokens that follow, whole objects", path)
    documents = dict.fromkeys(row["document"] for row in result["rows"])
    for document, colour in zip(documents, ("C0", "C1", "C2", "C3", "C4"), strict=False):
        rows = [row for row in result["rows"] if row["document"] == document and row.get("kl_recompute")]
        points = [(row["ratio"], max(row["kl"] / row["kl_recompute"], _EXACT), row["codec"]) for row in rows]
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o", color=colour, label=document)
        if colour == "C0":
            for x, y, name in points:
                axes.annotate(name, (x, y), fontsize=7, textcoords="offset points", xytext=(4, 4))
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(yscale="log", xlabel="bytes over raw bfloat16", ylabel="divergence, multiples of recompute noise")
    axes.legend(title="exact is drawn at the bottom")
    write_figure(figure, path)


PLOTS: dict[str, Callable[[Result, Path], None]] = {"crossover": draw_crossover, "codec": draw_codecs}


def _figure(title: str, path: Path) -> tuple[Any, Any]:
    figure = new_figure(path, (7, 4.5))
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="major", linewidth=0.3)
    return figure, axes
