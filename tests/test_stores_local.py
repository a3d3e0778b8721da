"""The local store: private, capped, and whole whatever happens to its writers."""

from __future__ import annotations

import fcntl
import itertools
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcdn.errors import CorruptError, UnavailableError, UsageError
from kvcdn.stores import local
from kvcdn.stores.local import LocalStore
from support.prefixes import Prefix, two_layers

MODEL = two_layers()


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "local", 10**9)


def find(store, prefix, block=-1):
    return store.find(MODEL.tag, prefix.names[block].address)


def disk_bytes(folder: Path) -> int:
    """What the files take of the disk at one moment, those being written included."""
    if not (folder / "lock").exists():
        return 0
    with (folder / "lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        return sum(512 * path.stat().st_blocks for part in ("prefixes", "writing") for path in folder.glob(f"{part}/*"))


def names(folder: Path, part: str) -> set[str]:
    return {path.name for path in folder.glob(f"{part}/*")}


def test_a_prefix_is_found_by_each_of_its_blocks(store):
    """And mapped as it was written, privately: what a reader changes is its own."""
    prefix = Prefix(MODEL, (1, 2), tail=50)
    assert find(store, prefix) is None
    key = prefix.write(store)
    mapped = [find(store, prefix, block) for block in range(3)]
    assert {key} == {file.key for file in mapped}
    assert all(bytes(prefix.image()) == bytes(file.memory) for file in mapped)
    prefix.check(memoryview(mapped[0].memory))
    mapped[0].memory[5000:5010] = b"x" * 10
    assert bytes(prefix.image()) == bytes(mapped[1].memory) == bytes(find(store, prefix).memory)


def test_everything_is_the_users_alone(store):
    """Folders 0700, files 0600, and a tag that keeps backups away."""
    Prefix(MODEL, (1,)).write(store)
    for path in [store.folder, *store.folder.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink() or path.name == "CACHEDIR.TAG":
            continue
        assert (0o700 if path.is_dir() else 0o600) == mode, path
    assert (store.folder / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o750, 0o701, 0o704])
def test_a_folder_that_others_can_get_at_is_refused(store, mode):
    """Neither read nor written, with the reason and what to do about it."""
    prefix = Prefix(MODEL, (1,))
    prefix.write(store)
    store.folder.chmod(mode)
    for act in (lambda: find(store, prefix), lambda: Prefix(MODEL, (2,)).write(store), store.stored, store.clear):
        with pytest.raises(UsageError, match="open to other users") as refused:
            act()
        assert "chmod 700" in refused.value.hint


def test_a_folder_of_another_user_is_refused(store, monkeypatch):
    """Whoever owns it could have put anything there."""
    prefix = Prefix(MODEL, (1,))
    prefix.write(store)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for act in (lambda: find(store, prefix), lambda: prefix.write(store), store.stored, store.clear):
        with pytest.raises(UsageError, match="not a folder of yours"):
            act()


def test_the_longest_unused_goes_first(tmp_path):
    """The cap holds after every write; use counts, not age."""
    prefixes = [Prefix(MODEL, (number,)) for number in range(8)]
    one = prefixes[0].file.disk_bytes(MODEL.layout)
    store = LocalStore(tmp_path / "local", 3 * one + one // 2)
    for number, prefix in enumerate(prefixes[:3]):
        prefix.write(store)
        os.utime(store.folder / "prefixes" / find(store, prefix).name, (1000 + number, 5))
    store.touch(find(store, prefixes[0]))
    prefixes[3].write(store)
    assert [True, False, True, True] == [find(store, prefix) is not None for prefix in prefixes[:4]]
    for prefix in prefixes[4:]:
        prefix.write(store)
        assert disk_bytes(store.folder) <= store.capacity
    assert 3 == len(store.stored())
    assert Prefix(MODEL, tuple(range(10, 16))).write(store) is None


def test_the_time_of_use_is_written_seldom_and_changes_nothing_else(store, monkeypatch):
    """Once a minute at most; what was checked stays checked, since the file is the same."""
    prefix = Prefix(MODEL, (1,))
    key = prefix.write(store)
    path = store.folder / "prefixes" / find(store, prefix).name
    os.utime(path, ns=(10**12, path.stat().st_mtime_ns))
    store.touch(find(store, prefix))
    first = path.stat().st_atime_ns
    assert first > 10**12
    store.touch(find(store, prefix))
    assert first == path.stat().st_atime_ns
    assert key == find(store, prefix).key


def test_what_is_served_already_is_not_written_again(store):
    """The same prefix, or a shorter one; a longer one replaces what it serves as well."""
    short, long, other = Prefix(MODEL, (1, 2)), Prefix(MODEL, (1, 2, 3), tail=9), Prefix(MODEL, (1, 4))
    assert short.write(store) is not None
    assert short.write(store) is None
    assert other.write(store) is not None
    assert long.write(store) is not None
    assert short.write(store) is None
    assert {len(long.names), len(other.names)} == {len(one.header.blocks) for one in store.stored()}
    for prefix in (short, long, other):
        assert find(store, prefix) is not None


def test_windows_of_a_shorter_prefix_are_not_replaced(store):
    """A longer prefix with its windows elsewhere does not serve the shorter one."""
    model = two_layers(window=10)
    short, long = Prefix(model, (1,)), Prefix(model, (1, 2), first=(0, 1024, 0))
    short.write(store)
    long.write(store)
    found = [store.find(model.tag, prefix.names[-1].address) for prefix in (short, long)]
    assert 2 == len({file.name for file in found}) == len(store.stored())


def test_one_writer_at_a_time_writes_a_prefix(store):
    """The second is turned down while the first is at it, and told that it is there afterwards."""
    prefix = Prefix(MODEL, (1,))
    with store.begin(prefix.file, MODEL.layout):
        assert prefix.write(store) is None
    assert prefix.write(store) is not None
    assert set() == names(store.folder, "writing")


def test_clear_takes_everything_and_what_is_being_written(store):
    """Of all models or of one; a draft that was cleared away never appears."""
    other = two_layers(name="other")
    kept, gone = Prefix(other, (1,)), Prefix(MODEL, (1,))
    kept.write(store)
    gone.write(store)
    mapped = find(store, gone)
    count, total = store.clear(MODEL.tag)
    assert (1, True) == (count, total >= gone.file.disk_bytes(MODEL.layout))
    assert find(store, gone) is None
    gone.check(memoryview(mapped.memory))
    assert store.find(other.tag, kept.names[0].address) is not None
    draft = store.begin(Prefix(MODEL, (2,)).file, MODEL.layout)
    with draft:
        assert 1 == store.clear()[0]
        assert draft.commit() is None
    assert [] == store.stored()
    assert [set()] * 3 == [names(store.folder, part) for part in ("prefixes", "index", "writing")]


def test_a_disk_that_takes_no_more_is_an_error_and_leaves_nothing(store):
    """As a full disk does, a limit on sizes of files breaks a write off in its middle."""
    prefix = Prefix(MODEL, (1, 2, 3))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UnavailableError, match="cannot write"):
            prefix.write(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert set() == names(store.folder, "writing") | names(store.folder, "prefixes")
    assert prefix.write(store) is not None


def test_nothing_is_kept_on_a_disk_that_is_nearly_full(store, monkeypatch):
    """The last of the disk is for others."""
    monkeypatch.setattr(local, "FREE_DISK_SHARE", 1.0)
    assert Prefix(MODEL, (1,)).write(store) is None
    assert set() == names(store.folder, "writing")


def test_a_stopped_holder_of_the_lock_is_not_waited_for_long(store, monkeypatch):
    """Readers take no lock; writers and upkeep give up."""
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.05)
    prefix = Prefix(MODEL, (1,))
    prefix.write(store)
    with (store.folder / "lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert find(store, prefix) is not None
        for act in (lambda: Prefix(MODEL, (2,)).write(store), store.clear):
            with pytest.raises(UnavailableError, match="locked by another process"):
                act()


def test_a_process_that_is_forked_in_between_holds_no_lock(store, monkeypatch):
    """As workers of a data loader are, at any moment of a writer's: they inherit its descriptors."""
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.05)
    prefix = Prefix(MODEL, (1,))
    evict, children = store._evict, []

    def fork_and_evict(room):
        children.append(os.fork())
        if not children[-1]:
            signal.pause()
        evict(room)

    monkeypatch.setattr(store, "_evict", fork_and_evict)
    try:
        assert prefix.write(store) is not None
        assert Prefix(MODEL, (2,)).write(store) is not None
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


STRANGE = {
    "a file in place of a link": lambda link: link.write_text("x"),
    "a folder in place of a link": lambda link: link.mkdir(),
    "a link to nothing": lambda link: link.symlink_to("0123456789abcdef.5"),
    "a link out of the store": lambda link: link.symlink_to("/etc/passwd"),
    "a link up": lambda link: link.symlink_to("../../prefixes/.."),
}


@pytest.mark.parametrize("case", STRANGE)
def test_an_index_that_is_damaged_is_a_miss_and_mends(store, case):
    """Nothing outside of the folder is opened, and the next writer puts it right."""
    prefix, other = Prefix(MODEL, (1,)), Prefix(MODEL, (2,))
    prefix.write(store)
    link = store.folder / "index" / str(MODEL.tag) / str(prefix.names[0].address)
    link.unlink()
    STRANGE[case](link)
    assert find(store, prefix) is None
    assert other.write(store) is not None
    assert find(store, other) is not None


def test_files_that_are_no_prefix_files_are_counted_and_can_be_cleared(store):
    """Rubbish in the folder counts against the cap and is shown as what it is."""
    Prefix(MODEL, (1,)).write(store)
    (store.folder / "prefixes" / "rubbish").write_bytes(b"x" * 9000)
    assert {None, MODEL.tag} == {one.header and one.header.model for one in store.stored()}
    assert 2 == store.clear()[0]


def test_a_store_that_never_was_is_empty(tmp_path):
    """Looking makes nothing."""
    store = LocalStore(tmp_path / "none" / "local")
    assert ([], (0, 0), None) == (store.stored(), store.clear(), find(store, Prefix(MODEL, (1,))))
    assert store.capacity > 0
    assert not (tmp_path / "none").exists()


def test_the_environment_names_the_store(tmp_path, monkeypatch):
    """A folder, a cap, or none at all; nonsense is told."""
    monkeypatch.setenv("KVCDN_LOCAL", str(tmp_path / "here"))
    monkeypatch.setenv("KVCDN_LOCAL_CAPACITY", "5GB")
    store = LocalStore.configured()
    assert (tmp_path / "here", 5 * 10**9) == (store.folder, store.capacity)
    monkeypatch.setenv("KVCDN_LOCAL_CAPACITY", "much")
    with pytest.raises(UsageError, match="KVCDN_LOCAL_CAPACITY"):
        LocalStore.configured()
    monkeypatch.setenv("KVCDN_LOCAL", "0")
    assert LocalStore.configured() is None
    monkeypatch.delenv("KVCDN_LOCAL")
    monkeypatch.delenv("KVCDN_LOCAL_CAPACITY")
    assert Path(os.environ["XDG_CACHE_HOME"]) / "kvcdn" / "local" == LocalStore.configured().folder


def test_writers_at_once_stay_below_the_cap_and_leave_it_whole(tmp_path):
    """Six processes write and evict, killed at random moments and begun anew: whole files below the cap, and no drafts."""
    folder, one = tmp_path / "local", Prefix(MODEL, (1, 1, 1)).file.disk_bytes(MODEL.layout)
    capacity, highest = 4 * one, 0
    program = Path(__file__).parent / "support" / "prefix_writer.py"
    paths = os.pathsep.join([str(program.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(program), str(folder), str(capacity), "40"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}) as writers:
        while writers.poll() is None:
            highest = max(highest, disk_bytes(folder))
            time.sleep(0.002)
    assert 0 == writers.returncode
    assert one < highest <= capacity
    store = LocalStore(folder, capacity)
    Prefix(MODEL, (99,)).write(store)
    assert set() == names(folder, "writing")
    # Every name that is there leads to a file that passes every check.
    held = 0
    for rest in (rest for count in range(3) for rest in itertools.product(range(3), repeat=count)):
        for prefix in (Prefix(MODEL, (first, *rest)) for first in range(6)):
            mapped = find(store, prefix)
            if mapped is not None:
                prefix.check(memoryview(mapped.memory))
                held += 1
    assert held


def test_a_discarded_file_is_a_miss(store):
    """What failed its check is removed once and for all readers."""
    prefix = Prefix(MODEL, (1,))
    prefix.write(store)
    path = store.folder / "prefixes" / find(store, prefix).name
    with path.open("r+b") as file:
        file.seek(prefix.file.places(MODEL.layout)[0][0].offset)
        file.write(b"damage")
    mapped = find(store, prefix)
    with pytest.raises(CorruptError):
        prefix.check(memoryview(mapped.memory))
    store.discard(mapped)
    assert find(store, prefix) is None
    assert prefix.write(store) is not None
