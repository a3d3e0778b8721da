"""Processes of this machine: their processor time and their children, as Linux's /proc tells; elsewhere nothing is told."""

from __future__ import annotations

import os
from pathlib import Path

_AFTER_NAME = 2
"""Fields of /proc/PID/stat are counted from 1, and the name, the second, may hold spaces: we count behind it."""

_PARENT, _USER, _SYSTEM = 4, 14, 15
"""Fields: the parent, and processor time in user and in kernel mode, in ticks (proc(5))."""


def cpu_seconds(pid: int) -> float:
    """Processor time of process `pid`, its ended children left out; 0 where the system does not tell."""
    fields = _stat(pid)
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def with_children(pid: int) -> list[int]:
    """`pid` and the processes that it has started."""
    try:
        others = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    except OSError:
        return [pid]
    return [pid, *(other for other in others if (fields := _stat(other)) and int(fields[_PARENT]) == pid)]


def _stat(pid: int) -> dict[int, str]:
    """The fields behind the name, by their numbers; empty where there is no such process, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return {}
    return dict(enumerate(text.rpartition(")")[2].split(), _AFTER_NAME + 1))
