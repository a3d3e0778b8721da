"""Launching: an edge as a process of its own, started, awaited and stopped. For demo, benchmarks and tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_core import to_jsonable_python

from kvcdn.edge.settings import ENV_PREFIX, EdgeSettings, load_settings
from kvcdn.errors import UnavailableError

START_SECONDS = 120.0
"""Starting takes half a second; walking a million files on a slow disk a minute."""

STOP_MARGIN_SECONDS = 10.0
"""What an edge may take to stop beyond the time its settings give running responses."""

_POLL_SECONDS = 0.01

_LAST_LINES = 5


@dataclass(frozen=True)
class RunningEdge:
    """An edge process that accepts connections at `url`."""

    url: str
    admin_url: str
    """Where metrics and administration are; `url` unless they have an address of their own."""
    pid: int
    process: subprocess.Popen[bytes]
    log_path: Path
    """Its standard error: the start line, then JSON lines."""

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def resident_bytes(self, field: str = "VmRSS") -> int:
        """Its resident memory: `VmRSS` now, `VmHWM` at most so far."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


@contextlib.contextmanager
def launch_edge(*, origin: str, cache_dir: Path | str, **settings: Any) -> Iterator[RunningEdge]:
    """Runs an edge process while the context lasts, by default on a free port of 127.0.0.1.

    `settings` are those of `EdgeSettings`. Raises UsageError for settings that cannot be, UnavailableError, with the last lines
    it wrote, where the process ends before it is ready.
    """
    with tempfile.TemporaryDirectory(prefix="kvcdn-edge-") as folder:
        ready = Path(folder) / "ready"
        given = {"listen": "127.0.0.1:0", **settings, "origin": origin, "cache_dir": cache_dir, "ready_file": ready}
        checked = load_settings(None, given)
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvcdn.edge"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(checked, given),
            )
        try:
            told = _await_ready(process, ready, log_path)
            yield RunningEdge(told["url"], told["admin_url"], process.pid, process, log_path)
        finally:
            _stop(process, checked.shutdown_seconds + STOP_MARGIN_SECONDS)


def _environment(settings: EdgeSettings, given: dict[str, Any]) -> dict[str, str]:
    """Ours, with the settings given: secrets do not belong on a command line."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    for field in given:
        value = getattr(settings, field)
        if value is not None:
            inherited[ENV_PREFIX + field.upper()] = _as_variable(value)
    return inherited


def _as_variable(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    if isinstance(value, dict | tuple):
        return json.dumps(to_jsonable_python(value))
    return str(value)


def _await_ready(process: subprocess.Popen[bytes], ready: Path, log_path: Path) -> dict[str, str]:
    deadline = time.monotonic() + START_SECONDS
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            ended = f"ended with {process.returncode}" if process.returncode is not None else "is not ready in time"
            raise UnavailableError(f"the edge {ended}: " + " | ".join(lines[-_LAST_LINES:]))
        time.sleep(_POLL_SECONDS)
    told: dict[str, str] = json.loads(ready.read_text(encoding="utf-8"))
    return told


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
