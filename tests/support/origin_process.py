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

START_SECONDS = 120
"""Importing takes seconds, on a busy machine many."""


@contextlib.contextmanager
def running_origin(folder: Path, model: Path | str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A service with one worker, whose origin and queue are in `folder`: its URL and its process."""
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    words = ["--model", model, "--origin", folder / "origin", "--queue", folder / "queue", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "KVCDN_SERVICE_READY_FILE": str(ready), "KVCDN_SERVICE_CLAIM_SECONDS": "6"}
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


def children(pid: int) -> list[int]:
    """The processes that the process `pid` has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
