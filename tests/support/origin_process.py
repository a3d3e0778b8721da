"""A prefill service as a process of its own, killed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 1200
"""Importing takes seconds, on a busy machine minutes."""


@contextlib.contextmanager
def running_origin(folder: Path, model: Path | str, **settings: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A service with one worker, its queue and, unless `settings` name another, its origin in `folder`: URL and process."""
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    words = ["--model", model, "--queue", folder / "queue", "--listen", "127.0.0.1:0"]
    words += [] if "origin" in settings else ["--origin", folder / "origin"]
    environment = {**os.environ, "KVCDN_SERVICE_READY_FILE": str(ready), "KVCDN_SERVICE_CLAIM_SECONDS": "6"}
    environment |= {f"KVCDN_SERVICE_{name.upper()}": value for name, value in settings.items()}
    program = Path(sys.executable).with_name("kvcdn")
    process = subprocess.Popen([str(program), "origin", *map(str, words)], env=environment)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield json.loads(ready.read_text())["url"], process
    finally:
        process.kill()
        process.wait()


def descendants(pid: int) -> dict[int, str]:
    """The processes below the process `pid`, with what each calls itself."""
    found: dict[int, str] = {}
    for child in children(pid):
        with contextlib.suppress(OSError):
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found |= descendants(child)
    return found


def children(pid: int) -> list[int]:
    """The processes that the process `pid` has started."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
