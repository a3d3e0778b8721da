"""The plot of `kvcdn simulate --plot`: how many prompts have their first token by when, with kvcdn and without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcdn.cli.figure import new_figure, write_figure

_COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#e08214", "#4d4d4d")

_LEAST_S = 1e-4
"""What a logarithmic axis begins with, where a time is 0."""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes the plot to `path`, a .png or .svg file. Raises UsageError without matplotlib, UnavailableError for a bad disk."""
    figure = new_figure(path, (7, 4))
    axes = figure.subplots()
    for number, run in enumerate(result["runs"]):
        colour = _COLOURS[number % len(_COLOURS)]
        for name, style in (("without", "--"), ("with", "-")):
            quantiles = [max(value, _LEAST_S) for value in run[name]["first_token_quantiles_s"]]
            label = " ".join(filter(None, (run["set"], f"{name} kvcdn")))
            axes.plot(quantiles, range(len(quantiles)), style, color=colour, label=label)
    axes.set(xscale="log", xlabel="seconds to the first token", ylabel="% of the prompts", ylim=(0, 100))
    axes.set_title(f"{result['traffic']}, over {result['topology']}", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    write_figure(figure, path)
