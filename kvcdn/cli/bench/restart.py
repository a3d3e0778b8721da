"""How long an edge with a large cache takes to start: by its index, and by walking its folder."""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcdn.cli.bench.machine import machine, spread

OBJECT_BYTES = 4
"""A start opens no object, so that their sizes do not matter."""

Tell = Callable[[str], None]


def measure_restart(objects: int, runs: int, tell: Tell) -> dict[str, Any]:
    """Seconds from starting the process until it accepts connections, medians of `runs`, with what an empty one takes."""
    with tempfile.TemporaryDirectory(prefix="kvcdn-restart-") as folder:
        cache, empty = Path(folder) / "cache", Path(folder) / "empty"
        (Path(folder) / "origin").mkdir()
        _start(Path(folder), cache)
        tell(f"making {objects:,} files in {cache} ...")
        _make_files(cache, objects)
        seconds: dict[str, list[float]] = {"empty_s": [], "walk_s": [], "index_s": []}
        for number in range(runs):
            tell(f"round {number + 1} of {runs}: an empty cache, a walk, the index")
            seconds["empty_s"].append(_start(Path(folder), empty)[0])
            for file in cache.glob("index*"):
                file.unlink()
            seconds["walk_s"].append(_start(Path(folder), cache)[0])
            index_s, resident = _start(Path(folder), cache)
            seconds["index_s"].append(index_s)
        medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
        told = {"spread_s": {name: spread(values) for name, values in seconds.items()}, "machine": machine()}
        return {"objects": objects, "runs": runs, **medians, "resident_bytes": resident, **told}


def _make_files(cache: Path, objects: int) -> None:
    """Files as an edge names them. Their contents are checked at their first use only."""
    tag = secrets.token_hex(16)
    for _ in range(objects):
        address = secrets.token_hex(32)
        name = f"{address}.{tag}.block.{OBJECT_BYTES}.{secrets.token_hex(4)}"
        handle = os.open(cache / "objects" / address[:2] / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(handle, bytes(OBJECT_BYTES))
        os.close(handle)


def _start(folder: Path, cache: Path) -> tuple[float, int]:
    """Seconds until an edge on `cache` is ready, and its resident bytes then."""
    from kvcdn.edge.launch import launch_edge  # noqa: PLC0415 - see kvcdn.cli

    began = time.monotonic()
    with launch_edge(origin=str(folder / "origin"), cache_dir=cache, capacity="1TB", scrub_bytes_per_second=0) as edge:
        return time.monotonic() - began, edge.resident_bytes()
