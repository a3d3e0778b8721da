"""What a folder store owes beyond the suite: nothing half-written whatever dies, nobody outside the root, clear words."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvcdn.errors import NotFoundError, UnavailableError, UsageError
from kvcdn.stores.folder import STAGING_FOLDER, STALE_SECONDS, FolderStore
from support import store_writer
from support.waiting import WAIT_SECONDS

WRITER = Path(store_writer.__file__)


def staged(root: Path) -> list[Path]:
    """Unfinished objects."""
    return list((root / STAGING_FOLDER).glob("*"))


def writer(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """The writing process of support.store_writer."""
    return subprocess.Popen([sys.executable, str(WRITER), str(root), *arguments], stdout=subprocess.PIPE, text=True)


class GatedPieces(Sequence[bytes]):
    """Pieces of which the last is handed out to the file only when the gate opens."""

    def __init__(self, root: Path) -> None:
        self.root, self.half, self.gate = root, threading.Event(), threading.Event()

    def __getitem__(self, index):
        return (b"a" * 100_000, b"b" * 100_000)[index]

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[bytes]:
        yield self[0]
        if staged(self.root):
            self.half.set()
            assert self.gate.wait(WAIT_SECONDS)
        yield self[1]


def test_no_partial_object_while_written(tmp_path: Path):
    """While a writer is in the middle of an object, no reader, in this store or another over the folder, sees any of it."""
    root = tmp_path / "objects"
    store, other = FolderStore(root), FolderStore(root)
    pieces = GatedPieces(root)
    created: list[bool] = []
    thread = threading.Thread(target=lambda: created.append(store.create("a/b", pieces)))
    thread.start()
    assert pieces.half.wait(WAIT_SECONDS)
    for reader in (store, other, FolderStore(root)):
        assert reader.stat("a/b") is None
        assert [] == list(reader.list(""))
        with pytest.raises(NotFoundError):
            reader.read("a/b")
    pieces.gate.set()
    thread.join()
    assert [True] == created
    assert b"a" * 100_000 + b"b" * 100_000 == other.read("a/b")
    assert [] == staged(root)


def test_kill_in_mid_write(tmp_path: Path):
    """A writer killed in the middle of an object leaves none, only a staging file that is swept when it is a day old."""
    root = tmp_path / "objects"
    process = writer(root, "slow")
    assert process.stdout is not None
    assert "half\n" == process.stdout.readline()
    process.kill()
    process.communicate()
    store = FolderStore(root)
    assert store.stat("slow/object") is None
    assert [] == list(store.list(""))
    assert 1 == len(staged(root))
    assert store.create("slow/object", [b"again"])
    assert 1 == len(staged(root))
    old = time.time() - STALE_SECONDS - 60
    os.utime(staged(root)[0], (old, old))
    FolderStore(root)
    assert [] == staged(root)
    assert b"again" == store.read("slow/object")


def test_kill_at_any_moment(tmp_path: Path):
    """Whenever a writer is killed, every object that is visible is whole, and what it had reported as created is there."""
    root = tmp_path / "objects"
    reported = 0
    for delay in (0.0, 0.011, 0.023, 0.037):
        process = writer(root, "loop")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.kill()
        rest, _ = process.communicate()
        reported += 1 + rest.count("\n")
    store = FolderStore(root)
    found = list(store.list("loop/"))
    assert reported <= len(found) <= reported + 4
    for info in found:
        data = store.read(info.key)
        assert info.size == len(data)
        assert data[:32] == hashlib.sha256(data[32:]).digest()


def test_file_size_limit(tmp_path: Path):
    """Where the system refuses to write more, the error says so and what to do, and nothing is left behind."""
    process = writer(tmp_path / "objects", "large", str(1 << 20))
    result = json.loads(process.communicate()[0])
    assert "UnavailableError" == result["error"]
    assert "large/object" in result["message"]
    assert "ulimit" in result["hint"]
    assert [] == result["left"]


def test_full_disk(tmp_path: Path):
    """On a disk that is really full the error names the disk, and nothing is left behind."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=6m none "$0" && exec "$1" "$2" "$0/objects" large 0'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(disk), sys.executable, str(WRITER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a disk of our own cannot be mounted here: {done.stderr.strip()[:100]}")
    result = json.loads(done.stdout)
    assert "UnavailableError" == result["error"]
    assert f"the disk of {disk} is full" in result["message"]
    assert f"df -h {disk}" in result["hint"]
    assert [] == result["left"]


def test_folder_is_made_late(tmp_path: Path):
    """Opening and reading make nothing; the first create makes the folder."""
    root = tmp_path / "objects"
    store = FolderStore(root)
    assert store.stat("a") is None
    assert [] == list(store.list(""))
    store.delete("a")
    with pytest.raises(NotFoundError):
        store.read("a")
    assert not root.exists()
    assert store.create("a", [b"x"])
    assert b"x" == store.read("a")


def test_no_place_for_a_folder(tmp_path: Path):
    """A file in the folder's place, or no folder around it, is told at once, with the next step."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="is not a folder"):
        FolderStore(tmp_path / "file")
    with pytest.raises(UnavailableError, match="nor the folder around it") as caught:
        FolderStore(tmp_path / "not" / "there")
    assert f"mkdir -p {tmp_path / 'not'}" in caught.value.hint


def test_folder_that_vanishes(tmp_path: Path):
    """A store whose disk is taken away while it is open answers with errors of ours."""
    parent = tmp_path / "disk"
    parent.mkdir()
    store = FolderStore(parent / "objects")
    store.create("a", [b"x"])
    (parent / "objects").rename(tmp_path / "gone")
    parent.rmdir()
    assert store.stat("a") is None
    with pytest.raises(UnavailableError, match="No such file"):
        store.create("b", [b"x"])


def test_symbolic_links_lead_nowhere(tmp_path: Path):
    """Links planted in the folder are neither followed nor listed, nor written through, nor deleted through."""
    root, outside = tmp_path / "objects", tmp_path / "outside"
    store = FolderStore(root)
    store.create("a/b", [b"inside"])
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "a" / "up").symlink_to("../..")
    for key in ("folder/secret", "file", "a/up/outside/secret"):
        assert store.stat(key) is None
        with pytest.raises(NotFoundError):
            store.read(key)
        with pytest.raises(UsageError, match=r"link|folder"):
            store.create(key, [b"x"])
    with pytest.raises(UsageError):
        store.create("folder/new", [b"x"])
    assert ["a/b"] == [info.key for info in store.list("")]
    for key in ("folder/secret", "file", "a/up/outside/secret"):
        store.delete(key)
    assert ["secret"] == [path.name for path in outside.iterdir()]
    assert b"secret" == (outside / "secret").read_bytes()
    assert [] == staged(root)


def test_root_may_be_a_link(tmp_path: Path):
    """The root itself is the operator's choice, a link too."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "objects").symlink_to(tmp_path / "disk")
    store = FolderStore(tmp_path / "objects")
    assert store.create("a/b", [b"x"])
    assert (tmp_path / "disk" / "a" / "b").read_bytes() == b"x"
    assert ["a/b"] == [info.key for info in store.list("")]


def test_odd_files_are_no_objects(tmp_path: Path):
    """A pipe does not hang a reader; names that are no keys are not listed."""
    root = tmp_path / "objects"
    store = FolderStore(root)
    store.create("a", [b"x"])
    os.mkfifo(root / "pipe")
    (root / ".hidden").write_bytes(b"x")
    (root / "with space").write_bytes(b"x")
    (root / "lost+found").mkdir()
    assert store.stat("pipe") is None
    with pytest.raises(NotFoundError):
        store.read("pipe")
    assert ["a"] == [info.key for info in store.list("")]


def test_object_and_folder_of_one_name(tmp_path: Path):
    """Disks cannot hold `a` beside `a/b`: said as it is, and nothing is harmed."""
    store = FolderStore(tmp_path / "objects")
    store.create("a/b", [b"x"])
    with pytest.raises(UsageError, match="already has the name"):
        store.create("a", [b"y"])
    with pytest.raises(UsageError, match="cannot be a folder"):
        store.create("a/b/c", [b"y"])
    assert ["a/b"] == [info.key for info in store.list("")]


def test_truncated_under_a_reader(tmp_path: Path):
    """A file that somebody shortens in mid-stream ends in an error, not in a shorter object."""
    root = tmp_path / "objects"
    store = FolderStore(root)
    store.create("a", [b"x" * 3_000_000])
    stream = store.stream("a")
    next(stream)
    (root / "a").chmod(0o600)
    os.truncate(root / "a", 1_500_000)
    with pytest.raises(UnavailableError, match="shorter"):
        list(stream)


def test_objects_are_read_only_files(tmp_path: Path):
    """Objects never change, and the mode of their files says so."""
    store = FolderStore(tmp_path / "objects")
    store.create("a", [b"x"])
    assert 0 == stat.S_IMODE((tmp_path / "objects" / "a").stat().st_mode) & 0o222


def test_no_descriptor_is_leaked(tmp_path: Path):
    """Success and failure of every kind leave as many files open as before."""
    store = FolderStore(tmp_path / "objects")
    store.create("a/b", [b"x" * 10])

    def everything() -> None:
        store.create("a/b", [b"y"])
        store.read("a/b")
        store.stat("a/c/d")
        store.stream("a/b").close()
        next(iter(store.list("")))
        for key in ("a", "a/b/c"):
            with pytest.raises(UsageError):
                store.create(key, [b"x"])
            with pytest.raises(NotFoundError):
                store.read(key)

    everything()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        everything()
    assert before == len(list(Path("/proc/self/fd").iterdir()))


def test_two_stores_race(tmp_path: Path):
    """Two stores over one folder, as two processes would, still have one winner per key."""
    stores = [FolderStore(tmp_path / "objects") for _ in range(4)]
    wins: list[tuple[int, str]] = []
    barrier = threading.Barrier(4)

    def race(number: int) -> None:
        for key in (f"new/{i % 5}/{i}" for i in range(25)):
            barrier.wait()
            if stores[number].create(key, [bytes([number])]):
                wins.append((number, key))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 25 == len(wins)
    assert all(bytes([number]) == stores[0].read(key) for number, key in wins)
