"""The suite: every benchmark in sizes that together take some twenty minutes on two cores, each kept as a JSON file.

A benchmark is a process of its own, so that none finds memory, threads or caches of another, and none that fails stops the
rest: its file of an earlier run stays.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcdn.cli.bench.synthetic_trace import SYNTHETIC, write_trace
from kvcdn.errors import UsageError

LIMIT_SECONDS = 1800.0
"""Of one benchmark; the longest takes some minutes on two cores."""


@dataclass(frozen=True)
class Bench:
    """A benchmark: the name of its file, its command, and its options in full and in quick."""

    name: str
    command: str
    full: tuple[str, ...]
    quick: tuple[str, ...]


BENCHES = (
    Bench("ttft", "ttft", ("--tokens", "3774", "--runs", "5"), ("--tokens", "256", "--runs", "1")),
    Bench("decode", "decode", ("--tokens", "1024,4096"), ("--tokens", "256", "--steps", "5")),
    Bench("publish", "publish", ("--tokens", "2048", "--runs", "5"), ("--tokens", "256", "--runs", "1")),
    Bench(
        "crossover",
        "crossover",
        ("--tokens", "3774", "--runs", "3", "--fetch-limit", "20", "--kill", "10"),
        ("--tokens", "256", "--runs", "1", "--fetch-limit", "1", "--mbit", "5,50,500"),
    ),
    Bench("codec", "codec", ("--tokens", "1024", "--runs", "3"), ("--tokens", "128", "--runs", "1")),
    Bench(
        "edge",
        "edge",
        ("--seconds", "2", "--rounds", "3", "--cold-size", "64MiB", "--slow-size", "1GiB"),
        (
            *("--seconds", "0.2", "--rounds", "1", "--clients", "10", "--cold-size", "16MiB"),
            *("--readers", "10", "--slow-size", "32MiB"),
        ),
    ),
    Bench("restart", "restart", ("--objects", "100000", "--runs", "3"), ("--objects", "1000", "--runs", "1")),
    Bench(
        "against",
        "against",
        ("--tokens", "3774", "--runs", "3", "--fault-tokens", "512"),
        ("--tokens", "256", "--runs", "1", "--precision", "native", "--fault-tokens", "128"),
    ),
)

EVICTION = "eviction"

_EVICTION_OPTIONS = ("--capacity", "1,5,20,50"), ("--capacity", "5")


def benches(names: Sequence[str], traces: Sequence[Path]) -> list[Bench]:
    """The benchmarks `names`, all if there are none; eviction once for each trace, or on a synthetic one. Raises UsageError."""
    known = {one.name for one in BENCHES} | {EVICTION}
    if unknown := set(names) - known:
        raise UsageError(f"no benchmark {min(unknown)!r}", hint=f"one of {', '.join(sorted(known))}")
    chosen = [one for one in BENCHES if not names or one.name in names]
    if not names or EVICTION in names:
        full, quick = _EVICTION_OPTIONS
        for trace in traces:
            name = f"{EVICTION}-{trace.name.partition('.')[0]}"
            place = ("--trace", str(trace))
            chosen.append(Bench(name, EVICTION, (*place, *full), (*place, *quick)))
        if not traces:
            chosen.append(Bench(f"{EVICTION}-{SYNTHETIC}", EVICTION, full, quick))
    return chosen


def run_benches(
    chosen: Sequence[Bench], folder: Path, *, quick: bool, model: str | None, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Runs each and keeps its JSON in `folder`. Returns seconds of those that ran, and why the others failed."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for number, bench in enumerate(chosen, 1):
        tell(f"[{number} of {len(chosen)}] {bench.name}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvcdn-bench-") as scratch:
            result = _run(bench, Path(scratch), quick=quick, model=model)
        if isinstance(result, str):
            failed[bench.name] = result
            tell(f"{bench.name} failed: {result}")
            continue
        seconds[bench.name] = round(time.monotonic() - began, 1)
        draft = folder / f".{bench.name}.json"
        draft.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")
        draft.replace(folder / f"{bench.name}.json")
        tell(f"{bench.name}: {seconds[bench.name]:.0f} s")
    return {"folder": str(folder), "quick": quick, "seconds": seconds, "failed": failed}


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The kept results by name. Raises UsageError where there are none, or a file is none."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not a benchmark's result: {error}", hint="run it again: kvcdn bench all") from None
        if not isinstance(result, Mapping):
            raise UsageError(f"{path} is not a benchmark's result", hint="run it again: kvcdn bench all")
        found[path.stem] = dict(result)
    if not found:
        raise UsageError(f"there are no results in {folder}", hint="kvcdn bench all")
    return found


def _run(bench: Bench, scratch: Path, *, quick: bool, model: str | None) -> dict[str, Any] | str:
    """The result, or why there is none. What the benchmark tells on standard error is shown as it comes."""
    program = [sys.executable, "-P", "-c", "from kvcdn.cli.main import run; run()"]
    words = [*program, "bench", bench.command, *(bench.quick if quick else bench.full), "--json"]
    if bench.name == f"{EVICTION}-{SYNTHETIC}":
        trace = scratch / f"{SYNTHETIC}.jsonl"
        write_trace(trace, quick=quick)
        words += ["--trace", str(trace)]
    if model is not None and bench.command in ("ttft", "decode", "publish", "crossover", "codec", "against"):
        words += ["--model", model]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, check=False, timeout=LIMIT_SECONDS)  # noqa: S603 - our own program
    except subprocess.TimeoutExpired:
        return f"it took longer than {LIMIT_SECONDS:.0f} s"
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return f"it ended with {done.returncode} and printed no result"
    return str(result["error"]) if done.returncode else result
