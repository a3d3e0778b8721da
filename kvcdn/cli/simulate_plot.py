"""The plot of `kvcdn simulate --plot`: how many prompts have their first token by when, with kvcdn and without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcdn.errors import UnavailableError, UsageError

_FORMATS = (".png", ".svg")

_COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#e08214", "#4d4d4d")

_LEAST_S = 1e-4
"""What a logarithmic axis begins with, where a time is 0."""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes the plot to `path`, a .png or .svg file. Raises UsageError without matplotlib, UnavailableError for a bad disk."""
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
    figure = Figure(figsize=(7, 4), layout="constrained")
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
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error}") from None
