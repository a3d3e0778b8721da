"""Figures: drawn with matplotlib, an optional extra, and written to .png or .svg files that are the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcdn.errors import UnavailableError, UsageError

_FORMATS = (".png", ".svg")


def new_figure(path: Path, inches: tuple[float, float]) -> Any:
    """A figure that `path` can take. Raises UsageError for another kind of file, and without matplotlib."""
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
    return Figure(figsize=inches, layout="constrained")


def write_figure(figure: Any, path: Path) -> None:
    """Raises UnavailableError for a bad disk."""
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error}") from None
