"""Processes that write prefixes into a local store, killed at random moments: `prefix_writer.py FOLDER CAPACITY KILLS`.

Forked, since a new interpreter would take longer to start than it lives.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from kvcdn.stores.local import LocalStore
from support.prefixes import Prefix, two_layers

WRITERS = 6

CHOICES = 6
"""Different first blocks: few, so that writers meet."""


def write_for_ever(store: LocalStore, numbers: random.Random) -> None:
    """Prefixes of one to three blocks, many of which begin alike."""
    model = two_layers()
    while True:
        rest = (numbers.randrange(3) for _ in range(numbers.randrange(3)))
        Prefix(model, (numbers.randrange(CHOICES), *rest)).write(store)


def start(store: LocalStore, seed: int) -> int:
    """A new writer's process id."""
    child = os.fork()
    if not child:
        write_for_ever(store, random.Random(seed))
    return child


def main() -> None:
    """Kills one writer after the other, and begins another in its place."""
    store, kills, numbers = LocalStore(Path(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3]), random.Random(0)
    Prefix(two_layers(), (0,)).write(store)  # loads the libraries before the forks
    writers = [start(store, seed) for seed in range(WRITERS)]
    for seed in range(kills):
        time.sleep(numbers.random() * 0.1)
        index = numbers.randrange(WRITERS)
        os.kill(writers[index], signal.SIGKILL)
        os.waitpid(writers[index], 0)
        writers[index] = start(store, WRITERS + seed)
    for writer in writers:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


if __name__ == "__main__":
    main()
