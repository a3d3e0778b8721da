"""Ledgers: what is written stays, whatever dies; what is too much is added up; what is no ledger is refused."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.accounting import recorder as recorder_module
from kvcdn.accounting.entry import HOUR_SECONDS, Entry, Key, Outcome, Part, PromptId, total
from kvcdn.accounting.ledger import Ledger
from kvcdn.accounting.recorder import Recorder
from kvcdn.accounting.snapshot import RunId, Snapshot
from kvcdn.errors import CorruptError, KvcdnError, NotFoundError, UnavailableError, UsageError
from support.usage import ENTRIES
from support.waiting import PROCESS_SECONDS

RUN = RunId(bytes(8))


def entry(number=0, *, prompt=True, **changes):
    key = Key(Part.EDGE, 1000 + number // 10, "acme", "ab" * 16, "cd" * 32, "", Outcome.HIT)
    key = key._replace(prompt=f"{number:032x}" if prompt else "", **changes)
    return Entry(key, {"requests": 1, "bytes_sent": number})


def everything(path):
    with Ledger(path, create=False) as ledger:
        return ledger.snapshot()


@settings(deadline=None)
@given(ENTRIES)
def test_entries_are_read_as_they_are_written(found):
    """One form, both ways."""
    assert found == Entry.decode(found.encode())


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.builds(
        lambda one, at, byte: one.encode()[:at] + byte + one.encode()[at:],
        ENTRIES,
        st.integers(0, 200),
        st.binary(min_size=1, max_size=3),
    )
)
def test_other_bytes_end_in_one_error(line):
    """Or are an entry, in its one form."""
    try:
        found = Entry.decode(line)
    except CorruptError:
        return
    assert line == found.encode()


def test_what_is_written_is_there(tmp_path):
    """In another process, too, and with the run that wrote it as long as that does not say that it ended."""
    path = tmp_path / "usage.sqlite"
    with Ledger(path) as ledger:
        ledger.begin_run(RUN, Part.EDGE)
        ledger.write(RUN, [entry(number) for number in range(20)])
        assert (RUN,) == tuple(run.id for run in everything(path).head.runs)
        ledger.end_run(RUN)
    found = everything(path)
    assert [entry(number) for number in range(20)] == list(found.entries)
    assert () == found.head.runs
    assert 0o600 == path.stat().st_mode & 0o777


def test_snapshots_travel_as_lines(tmp_path):
    """And are refused where a line is missing, cut, too much or no entry."""
    path = tmp_path / "usage.sqlite"
    with Ledger(path) as ledger:
        ledger.write(RUN, [entry(number) for number in range(5)])
        lines: list[bytes] = []
        ledger.copy_lines(lines.append)
    found = Snapshot.decode(lines, "it")
    assert everything(path) == found
    assert lines == list(found.lines())
    for bad in ([], lines[:-1], [*lines, lines[-1]], [*lines[:-1], lines[-1][:-1]], [*lines[:-1], b"{}\n"], lines[1:]):
        with pytest.raises(CorruptError):
            Snapshot.decode(bad, "it")


@pytest.mark.parametrize("summed", [1000, 6])
def test_a_full_ledger_adds_up_and_loses_nothing_but_details(tmp_path, summed):
    """Sums stay exact; prompts go first, then documents; where that is not enough the oldest hours are deleted, and counted."""
    path = tmp_path / "usage.sqlite"
    everything_counted = [entry(number, document=f"{number % 3:064x}") for number in range(100)]
    with Ledger(path, detailed=16, summed=summed) as ledger:
        versions = []
        for one in everything_counted:
            ledger.write(RUN, [one])
            versions.append(ledger.snapshot().head.version)
    found = everything(path)
    assert versions == sorted(set(versions))
    assert found.head.folded_to >= 1007
    detailed = [one for one in found.entries if one.key.prompt]
    assert everything_counted[-len(detailed) :] == detailed
    assert 13 <= len(detailed) <= 17
    if summed == 1000:
        assert 0 == found.head.forgotten
        assert total(one.counts for one in everything_counted) == total(one.counts for one in found.entries)
        assert 3 == len({one.key.document for one in found.entries})
    else:
        assert found.head.forgotten > 0
        assert len(found.entries) - len(detailed) <= summed
        last_hour = [one for one in everything_counted if one.key.hour == 1008]
        assert total(one.counts for one in last_hour) == total(one.counts for one in found.entries if one.key.hour == 1008)
        assert "" in {one.key.document for one in found.entries}


def test_processes_share_a_ledger(tmp_path):
    """Several write at once, and nothing is lost or twice."""
    path = tmp_path / "usage.sqlite"
    program = (
        "import sys; from pathlib import Path\n"
        "from kvcdn.accounting.entry import Key, Outcome, Part\n"
        "from kvcdn.accounting.recorder import Recorder\n"
        "with Recorder(Path(sys.argv[1]), Part.CLIENT, flush_s=0.001) as recorder:\n"
        "    for number in range(200):\n"
        "        prompt = f'{int(sys.argv[2]):016x}{number:016x}'\n"
        "        recorder.add(Key(Part.CLIENT, 5, '', '', '', prompt, Outcome.REUSED), {'prompts': 1})\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, path, str(number)]) for number in range(3)]
    assert [0, 0, 0] == [child.wait(PROCESS_SECONDS) for child in children]
    found = everything(path)
    assert 600 == len({one.key.prompt for one in found.entries}) == total(one.counts for one in found.entries)["prompts"]
    assert () == found.head.runs


def test_a_killed_process_loses_what_it_had_not_written(tmp_path):
    """And no more: it stands in the ledger as a run that did not say that it ended."""
    path = tmp_path / "usage.sqlite"
    program = (
        "import sys, time; from pathlib import Path\n"
        "from kvcdn.accounting.entry import Key, Outcome, Part\n"
        "from kvcdn.accounting.recorder import Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]), Part.EDGE, flush_s=0.001)\n"
        "for number in range(100000):\n"
        "    recorder.add(Key(Part.EDGE, 5, '', '', '', f'{number:032x}', Outcome.HIT), {'requests': 1})\n"
        "    recorder.flush()\n"
        "    print(number, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True)
    told = [int(child.stdout.readline()) for _ in range(50)]
    child.send_signal(signal.SIGKILL)
    told += [int(line) for line in child.stdout.read().splitlines()]
    child.stdout.close()
    child.wait(PROCESS_SECONDS)
    found = everything(path)
    numbers = sorted(int(one.key.prompt, 16) for one in found.entries)
    assert list(range(len(numbers))) == numbers
    assert len(told) <= len(numbers) <= len(told) + 1
    assert [Part.EDGE] == [run.part for run in found.head.runs]
    with Ledger(path) as ledger:
        ledger.write(RUN, [entry(1)])
    assert len(numbers) + 1 == len(everything(path).entries)


def test_counting_neither_waits_nor_fails(tmp_path, monkeypatch):
    """Where the disk refuses, counts wait; what had no room to wait is told once it can be."""
    monkeypatch.setattr(recorder_module, "WAITING_KEYS", 10)
    path = tmp_path / "usage.sqlite"
    recorder = Recorder(path, Part.EDGE, flush_s=0.001)
    refused = [True]

    def write(*given):
        if refused[0]:
            raise UnavailableError("the disk is full")
        return right(*given)

    right = recorder._ledger.write
    monkeypatch.setattr(recorder._ledger, "write", write)
    for number in range(100):
        recorder.add(entry(number, hour=5).key, {"requests": 1})
    recorder.flush()
    assert () == everything(path).entries
    refused[0] = False
    recorder.close()
    found = everything(path)
    assert 100 == total(one.counts for one in found.entries)["requests"] + found.head.dropped
    assert 10 <= sum(bool(one.key.prompt) for one in found.entries) <= 30
    assert 5 == found.head.folded_to  # whose prompts were not told apart any more


def test_a_clock_that_was_ahead_does_not_hide_the_hours_until_then(tmp_path):
    """What was counted in an hour to come is added up like all else, and hours up to now are told as folded, no further."""
    now = 1000
    with Ledger(tmp_path / "usage.sqlite", detailed=16, clock=lambda: now * HOUR_SECONDS + 60.0) as ledger:
        for number in range(40):
            ledger.write(RUN, [entry(number, hour=now + 700_000 if number == 3 else now - 5)])
        found = ledger.snapshot()
    assert now - 5 == found.head.folded_to
    assert 40 == total(one.counts for one in found.entries)["requests"]


def test_threads_count_together(tmp_path):
    """Counts under one key are one entry a flush."""
    with Recorder(tmp_path / "usage.sqlite", Part.EDGE, flush_s=0.01) as recorder:
        threads = [
            threading.Thread(target=lambda: [recorder.add(entry(7).key, {"requests": 1}) for _ in range(500)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = everything(tmp_path / "usage.sqlite")
    assert 2000 == total(one.counts for one in found.entries)["requests"]
    assert len(found.entries) < 1000


def test_a_recorder_that_counts_nothing_leaves_no_run(tmp_path):
    """And has no thread."""
    with Recorder(tmp_path / "usage.sqlite", Part.CLIENT) as recorder:
        assert recorder._thread is None
    assert () == everything(tmp_path / "usage.sqlite").entries


def test_a_forked_child_is_a_run_of_its_own(tmp_path):
    """Servers load a model, then fork."""
    path = tmp_path / "usage.sqlite"
    recorder = Recorder(path, Part.CLIENT, flush_s=0.001)
    recorder.add(entry(1).key, {"requests": 1})
    recorder.flush()
    child = os.fork()
    if not child:
        recorder.add(entry(2).key, {"requests": 1})
        recorder.close()
        os._exit(0)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    recorder.add(entry(3).key, {"requests": 1})
    recorder.close()
    assert 3 == total(one.counts for one in everything(path).entries)["requests"]


def test_what_is_no_ledger_is_refused(tmp_path):
    """Another database, another file, a folder, and a file that somebody wrote into: each with one error, untouched."""
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE jobs (id)")
    base.close()
    (tmp_path / "text").write_text("no ledger, but a letter. " * 50)
    (tmp_path / "empty").touch()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for path, error in ((other, UsageError), (tmp_path / "text", CorruptError), (tmp_path, UsageError)):
        with pytest.raises(error):
            Ledger(path)
    with pytest.raises(UsageError):
        Ledger(tmp_path / "empty", create=False)
    with pytest.raises(NotFoundError):
        Ledger(tmp_path / "missing", create=False)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"counts":{"bytes_sent":-1}}', "é"])
def test_rows_of_others_are_not_believed(tmp_path, text):
    """Whoever can write into the file can lie, but not have nonsense added up."""
    path = tmp_path / "usage.sqlite"
    with Ledger(path) as ledger:
        ledger.write(RUN, [entry(1)])
    base = sqlite3.connect(path)
    base.execute("INSERT INTO entries (hour, entry) VALUES (1, ?)", (text,))
    base.commit()
    base.close()
    with pytest.raises(KvcdnError):
        everything(path)


def test_time_goes_by_hours():
    """Of UTC."""
    from kvcdn.accounting.entry import hour_of

    assert 0 == hour_of(3599.9)
    assert 1 == hour_of(3600)
    assert hour_of() == int(time.time() // 3600)
    assert 32 == len(str(PromptId.new()))
    assert PromptId.new() != PromptId.new()
