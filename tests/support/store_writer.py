"""A process that writes into a folder store, to be killed or starved: `store_writer.py FOLDER slow|loop|large [BYTES]`."""

from __future__ import annotations

import hashlib
import itertools
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcdn.errors import KvcdnError
from kvcdn.stores.folder import FolderStore

OBJECT_BYTES = 4 << 20


class SlowPieces(Sequence[bytes]):
    """Two pieces; a minute passes before the second is handed out, once the first was asked for to be written."""

    def __getitem__(self, index):
        return (b"first" * 300_000, b"second")[index]

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[bytes]:
        yield self[0]
        if (Path(sys.argv[1]) / ".tmp").exists():  # not while sizes are summed up, before anything is written
            say("half")
            time.sleep(60)
        yield self[1]


def say(line: str) -> None:
    """Tells the test, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def content(number: int) -> bytes:
    """An object that carries its own hash, so that a reader can tell whether it is whole."""
    body = number.to_bytes(8, "big") * (OBJECT_BYTES // 8)
    return hashlib.sha256(body).digest() + body


def main() -> None:
    """Writes as told, then prints how it ended as one JSON line."""
    store, mode = FolderStore(sys.argv[1]), sys.argv[2]
    try:
        if mode == "slow":
            store.create("slow/object", SlowPieces())
        elif mode == "loop":
            for number in itertools.count():
                store.create(f"loop/{time.time_ns()}", [content(number)])
                say(str(number))
        elif mode == "large":
            limit = int(sys.argv[3])
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            store.create("large/object", [b"x" * OBJECT_BYTES] * 2)
    except KvcdnError as error:
        left = [str(path) for path in Path(sys.argv[1]).rglob("*") if path.is_file()]
        say(json.dumps({"error": type(error).__name__, "message": str(error), "hint": error.hint, "left": left}))


if __name__ == "__main__":
    main()
