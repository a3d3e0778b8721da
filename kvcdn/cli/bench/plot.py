"""Plots of benchmarks, by the benchmark's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvcdn.cli.bench.codec import PUBLISHED
from kvcdn.cli.bench.codec_plot import draw_codecs
from kvcdn.cli.figure import new_figure, write_figure

Result = Mapping[str, Any]


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


def _draw_codecs(result: Result, path: Path) -> None:
    draw_codecs(result["rows"], PUBLISHED, path)


PLOTS: dict[str, Callable[[Result, Path], None]] = {"crossover": draw_crossover, "codec": _draw_codecs}


def _figure(title: str, path: Path) -> tuple[Any, Any]:
    figure = new_figure(path, (7, 4.5))
    axes = figure.subplots()
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="major", linewidth=0.3)
    return figure, axes
