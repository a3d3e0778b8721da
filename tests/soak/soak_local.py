"""A soak of the local store: writers, readers and `kvcdn cache clear` at once, killed at random moments (`make soak-local`).

At the end no reader saw a wrong byte, the cap was never exceeded, and nothing is left that no later writer takes away.
KVCDN_SOAK_SECONDS says how long (900). The store lies in KVCDN_SOAK_FOLDER where that is set: on a file system of a few
megabytes, as that of `make soak-local`, the disk is full again and again, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvcdn.client.loading.local import LocalPrefixes
from kvcdn.errors import UnavailableError
from kvcdn.keys import Chain, Namespace
from kvcdn.model.place import all_on
from kvcdn.stores.local import LocalStore
from support.prefixes import TRUST, Prefix, two_layers

SECONDS = float(os.environ.get("KVCDN_SOAK_SECONDS", "900"))

FOLDER = os.environ.get("KVCDN_SOAK_FOLDER")

WRITERS, READERS = 4, 2

CLEAR_SECONDS = 20

PAUSE_SECONDS = 0.04
"""The longest rest between two steps of a process: cores are for others, too."""

CHOICES = 4
"""Different blocks: few, so that writers and readers meet."""

HELD = 6
"""Prefixes that a reader keeps mapped, and looks at again, long after they were evicted."""

MODELS = (two_layers(), two_layers(window=10, name="windowed"))


def pick(chance: random.Random) -> Prefix:
    """A prefix of one to three blocks, with a short last one or without."""
    model = chance.choice(MODELS)
    choices = tuple(chance.randrange(CHOICES) for _ in range(chance.randint(1, 3)))
    tail = chance.choice([0, 0, 1, 700])
    return Prefix(model, choices, tail)


def tell(folder: Path, word: str) -> None:
    """Counts `word`: a byte more in a file of its own, which survives whoever is killed."""
    with (folder / word).open("ab", buffering=0) as counts:
        counts.write(b".")


def write(store: LocalStore, chance: random.Random, counts: Path) -> None:
    """Writes prefixes for ever, under one cap or another."""
    while True:
        time.sleep(chance.random() * PAUSE_SECONDS)
        prefix = pick(chance)
        try:
            tell(counts, "written" if prefix.write(store) else "not wanted")
        except UnavailableError as error:
            tell(counts, "disk full" if "No space" in str(error) else "unavailable")


def read(store: LocalStore, chance: random.Random, counts: Path) -> None:
    """Maps prefixes for ever, compares every row with what was published, and those it holds again."""
    prefixes, held = LocalPrefixes(store), []
    while True:
        time.sleep(chance.random() * PAUSE_SECONDS)
        prefix = pick(chance)
        chain = Chain(prefix.model, Namespace.public(), [*prefix.token_ids, 0])
        found = prefixes.find(chain, (len(prefix.token_ids),), TRUST, all_on("cpu", prefix.model.layout))
        tell(counts, "missed" if found is None else "found")
        if found is not None:
            held = [*held, (prefix, found)][-HELD:]
        for one, mapped in held:
            if not right(one, mapped):
                tell(counts, "WRONG")


def right(prefix: Prefix, found) -> bool:
    """Whether every row that the layers hold is the publisher's."""
    for index, layer in enumerate(found.layers):
        for name in found.blocks:
            start, end = max(name.start, getattr(layer, "first", 0)), min(name.end, found.length)
            if not prefix.model.layout.layers[index].tensors or start >= end:
                continue
            for rows, raw, spec in zip(
                layer.rows(start, end), prefix.raw(name)[index], prefix.model.layout.layers[index].tensors, strict=True
            ):
                size = spec.bytes_per_token
                expected = raw[(start - name.start) * size : (end - name.start) * size]
                if expected != rows.contiguous().numpy().tobytes():
                    return False
    return True


def fill(folder: Path, chance: random.Random, counts: Path) -> None:
    """Takes all of the disk, and gives it back, for ever."""
    while True:
        time.sleep(chance.random() * 3)
        with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(1 << 16))
        tell(counts, "disk filled")
        time.sleep(chance.random())
        (folder / "ballast").unlink(missing_ok=True)


def start(work: Callable[..., None], *arguments: object) -> int:
    """A forked process that works until it is killed."""
    child = os.fork()
    if not child:
        try:
            work(*arguments)
        finally:
            os._exit(70)
    return child


def disk_bytes(folder: Path) -> int:
    """What all files take of the disk at one moment."""
    with (folder / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        total = 0
        for part in ("prefixes", "writing"):
            for path in folder.glob(f"{part}/*"):
                with contextlib.suppress(FileNotFoundError):
                    total += 512 * path.stat().st_blocks
        return total


class Workers:
    """Processes by their places; whoever is killed is followed by another."""

    def __init__(self, ground: Path, counts: Path, capacities: tuple[int, int]) -> None:
        self.chance = random.Random(0)
        self.kills: Counter[str] = Counter()
        self._ground, self._counts, self._capacities = ground, counts, capacities
        self._number = 0
        self._pids = [self._begin(place) for place in range(WRITERS + READERS + (FOLDER is not None))]

    def _begin(self, place: int) -> int:
        self._number += 1
        low, folder, chance = self._capacities[0], self._ground / "local", random.Random(self._number)
        if place < WRITERS:
            return start(write, LocalStore(folder, self.chance.choice(self._capacities)), chance, self._counts)
        if place < WRITERS + READERS:
            return start(read, LocalStore(folder, low), chance, self._counts)
        return start(fill, self._ground, chance, self._counts)

    def kill_one(self) -> None:
        """A writer or a reader, at whatever it is."""
        place = self.chance.randrange(WRITERS + READERS)
        os.kill(self._pids[place], signal.SIGKILL)
        ended = os.waitstatus_to_exitcode(os.waitpid(self._pids[place], 0)[1])
        assert -signal.SIGKILL == ended, "a worker ended by itself"
        self.kills["writers" if place < WRITERS else "readers"] += 1
        self._pids[place] = self._begin(place)

    def end(self) -> None:
        for worker in self._pids:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
        (self._ground / "ballast").unlink(missing_ok=True)


class Clearing:
    """`kvcdn cache clear` every `CLEAR_SECONDS`, sometimes killed, and now and then the clearing of one model."""

    def __init__(self, store: LocalStore, counts: Path) -> None:
        self._store, self._counts = store, counts
        self._command: subprocess.Popen[bytes] | None = None
        self._last = time.monotonic()

    def turn(self, workers: Workers) -> None:
        if self._command is not None and self._command.poll() is None:
            if workers.chance.random() < 0.1:
                self.end()
                workers.kills["cache clear"] += 1
        elif time.monotonic() - self._last > CLEAR_SECONDS:
            program = [sys.executable, "-c", "from kvcdn.cli.main import run; run()", "cache", "clear"]
            environment = {**os.environ, "KVCDN_LOCAL": str(self._store.folder)}
            self._command = subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL)
            self._last = time.monotonic()
            tell(self._counts, "cleared")
        if workers.chance.random() < 0.01:
            self._store.clear(MODELS[1].tag)
            tell(self._counts, "one model cleared")

    def end(self) -> None:
        if self._command is not None:
            self._command.kill()
            self._command.wait()


def test_a_local_store_survives(tmp_path: Path) -> None:
    """Minutes of everything at once."""
    ground = Path(tempfile.mkdtemp(dir=FOLDER)) if FOLDER else tmp_path / "ground"
    counts, folder = tmp_path / "counts", ground / "local"
    for path in (counts, ground):
        path.mkdir(exist_ok=True)
    one = Prefix(MODELS[0], (1, 1, 1), 700).file.disk_bytes(MODELS[0].layout)
    low, high, highest = 4 * one, 8 * one, 0
    store = LocalStore(folder, low)
    Prefix(MODELS[0], (0,)).write(store)  # loads the libraries before the forks
    workers, clearing = Workers(ground, counts, (low, high)), Clearing(store, counts)
    ends = time.monotonic() + SECONDS
    try:
        while time.monotonic() < ends:
            time.sleep(workers.chance.random() * 0.2)
            highest = max(highest, disk_bytes(folder))
            workers.kill_one()
            clearing.turn(workers)
    finally:
        workers.end()
        clearing.end()
    told = {path.name: path.stat().st_size for path in sorted(counts.iterdir())}
    sys.stdout.write(f"\nkilled {dict(workers.kills)}; {told}; at most {highest:,} of {high:,} bytes\n")
    assert 0 == told.get("WRONG", 0)
    assert one < highest <= high
    assert Prefix(MODELS[0], (99,)).write(store) is not None
    assert disk_bytes(folder) <= low
    assert [] == list((folder / "writing").iterdir())
    store.clear()
    assert {"lock", "CACHEDIR.TAG"} == {path.name for path in folder.rglob("*") if not path.is_dir()}
    if FOLDER:
        shutil.rmtree(ground)
