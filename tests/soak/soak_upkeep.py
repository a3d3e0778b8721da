"""Upkeep of a large origin: `ls`, `gc`, `fsck` and `journal verify` over 100,000 documents, in a folder and in real S3.

Prints seconds, processor seconds and peak memory of each command, and checks what it found.

KVCDN_SOAK_DOCUMENTS=100000 pytest -s -p no:xdist --timeout 0 tests/soak/soak_upkeep.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcdn.digest import Digest, hash_bytes
from kvcdn.journal import START, Entry, Head, Published, chain_digest, journal_key
from kvcdn.keys import block_key, manifest_key
from kvcdn.manifest import BlockEntry, Manifest, open_manifest
from kvcdn.signing import SigningKey
from support.blocks import make_document, make_producer
from support.library import CREATED, small_model
from support.seaweed import S3Server, running_seaweed, weed_binary

DOCUMENTS = int(os.environ.get("KVCDN_SOAK_DOCUMENTS", "100000"))

BLOCKS = 4
"""Of each document, that no other has: upkeep holds their addresses. The objects are there for one document in ten."""

CHAINS = 8
"""Documents whose blocks all others share, where every block is real."""

GARBAGE = 1000
"""Blocks that no document names."""

EXPIRED = 500
"""Documents whose time is over: gc removes them, and their blocks."""

MAX_BYTES = 700_000_000
"""Of memory that a command may take for 100,000 documents; an idle interpreter has 60 MB."""

LOOK_SECONDS = 0.05

KEY = SigningKey.generate()


def objects() -> Iterator[tuple[str, bytes]]:
    """Every object of the origin: sound manifests and entries, and blocks of a few bytes, which nobody reads here."""
    model, chance, head = small_model(), random.Random(0), START
    for number in range(DOCUMENTS):
        length = model.layout.block_tokens
        addresses = [Digest(chance.randbytes(32)) for _ in range(BLOCKS)]
        expires = CREATED + 1 if number < EXPIRED else None
        manifest = Manifest(
            address=Digest(chance.randbytes(32)),
            fingerprint=model.fingerprint,
            model_name=model.name,
            layout=model.layout,
            precision=model.precision,
            tokens=BLOCKS * length,
            blocks=tuple(BlockEntry(address, length, 4096, hash_bytes(address)) for address in addresses),
            created=CREATED,
            expires=expires,
            label=f"document {number}",
            producer=make_producer(model),
        )
        data = manifest.seal(KEY)
        yield manifest_key(model.tag, manifest.address), data
        deed = Published(model.tag, manifest.address, hash_bytes(data), expires)
        entry = Entry(number + 1, head.digest, CREATED, deed).seal(KEY)
        yield journal_key(number + 1), entry
        head = Head(number + 1, chain_digest(entry))
        if number % 10 == 9:
            yield from ((block_key(model.tag, address), b"a block") for address in addresses)
    for _ in range(GARBAGE):
        yield block_key(model.tag, Digest(chance.randbytes(32))), b"a block"


def sound_objects() -> Iterator[tuple[str, bytes]]:
    """An origin in which all is well: documents that share the blocks of a few, each of which begins as another."""
    chance = random.Random(1)
    published = [make_document(tokens=3 * 1024, seed=seed, key=KEY) for seed in range(CHAINS)]
    for one in published:
        yield from one.blocks.items()
    manifests = [open_manifest(one.manifest_bytes, one.manifest_key) for one in published]
    for number in range(DOCUMENTS):
        manifest = replace(manifests[number % CHAINS], address=Digest(chance.randbytes(32)), label=f"document {number}")
        yield manifest_key(manifest.tag, manifest.address), manifest.seal(KEY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The origin as a folder."""
    with _folder(tmp_path_factory, objects()) as root:
        yield root


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An origin in which all is well, as a folder."""
    with _folder(tmp_path_factory, sound_objects()) as root:
        yield root


@contextlib.contextmanager
def _folder(tmp_path_factory: pytest.TempPathFactory, found: Iterable[tuple[str, bytes]]) -> Iterator[Path]:
    """Written without the care that real publishers take."""
    root = tmp_path_factory.mktemp("origin")
    for key, data in found:
        path = root / key
        try:
            path.write_bytes(data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The same in S3."""
    with _server(folder, tmp_path_factory) as running:
        yield running


@contextlib.contextmanager
def _server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """S3 with what is in `folder`, put there by the server's own tool: a client would take longer than what is measured."""
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        words = Path(f"/proc/{running.pid}/cmdline").read_bytes().decode().split("\0")
        ports = dict(word[1:].split("=", 1) for word in words if word.startswith("-filer.port"))
        target = f"http://127.0.0.1:{ports['filer.port']}.{ports['filer.port.grpc']}/buckets/{running.bucket}/"
        subprocess.run([weed_binary(), "filer.copy", "-c=16", folder / "v1", target], check=True, capture_output=True)
        yield running


def peak_bytes(pid: int) -> int:
    """Resident at most; 0 of a process that has ended."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text("ascii"))
    return int(found[1]) * 1024 if found else 0


def measured(tmp_path: Path, name: str, *words: object, **environment: str) -> dict:
    """Runs the installed program with --json, tells what it took, and gives what it printed."""
    program = Path(sys.executable).with_name("kvcdn")
    out, err = tmp_path / "out", tmp_path / "err"
    began = time.monotonic()
    with out.open("wb") as output, err.open("wb") as errors:
        process = subprocess.Popen(
            [str(program), *map(str, words), "--json"], stdout=output, stderr=errors, env={**os.environ, **environment}
        )
        # What the system tells of an ended process holds what it was forked from.
        peak, ended = 0, (0, 0, None)
        while not ended[0]:
            peak = max(peak, peak_bytes(process.pid))
            time.sleep(LOOK_SECONDS)
            ended = os.wait4(process.pid, os.WNOHANG)
    _, status, usage = ended
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    lines = err.read_text().splitlines()
    sys.stderr.write(
        f"{name}: {seconds:.1f} s, {usage.ru_utime + usage.ru_stime:.1f} s of processor, {peak / 1e6:.0f} MB at most, "
        f"{len(lines)} lines of progress such as {lines[len(lines) // 2] if lines else '-'!r}\n"
    )
    assert process.returncode == 0, lines[-5:]
    assert peak < MAX_BYTES * max(1, DOCUMENTS / 100_000)
    return json.loads(out.read_text())


def check(tmp_path: Path, where: str, origin: str, **environment: str) -> None:
    """What each command is to find; the second gc finds nothing more."""
    trust = tmp_path / "trust"
    trust.write_text(f"{KEY.public.text} me\n")
    listed = measured(tmp_path, f"{where} ls", "ls", "--origin", origin, "--trust", trust, **environment)
    assert len(listed["documents"]) == DOCUMENTS
    verified = measured(
        tmp_path, f"{where} journal verify", "journal", "verify", "--origin", origin, "--trust", trust, **environment
    )
    assert (DOCUMENTS, []) == (verified["entries"], verified["findings"])
    garbage, blocks = GARBAGE + EXPIRED // 10 * BLOCKS, (DOCUMENTS - EXPIRED) // 10 * BLOCKS
    for name, removed in (("gc --dry-run", garbage), ("gc", garbage), ("gc again", 0)):
        words = ["gc", "--origin", origin, "--grace", "0s", *(["--dry-run"] if "dry" in name else [])]
        found = measured(tmp_path, f"{where} {name}", *words, **environment)
        assert (removed, blocks, []) == (found["blocks_removed"], found["blocks_kept"], found["skipped"])


def test_a_folder(tmp_path, folder) -> None:
    """On this machine's disk."""
    check(tmp_path, "folder", str(folder))


def test_s3(tmp_path, server) -> None:
    """Over HTTP, from a server that shares this machine's processors."""
    check(tmp_path, "s3", server.url(), **server.environment())


def check_sound(tmp_path: Path, where: str, origin: str, **environment: str) -> None:
    """Every document is there, every block is right, and nothing is to be removed."""
    listed = measured(tmp_path, f"{where} ls", "ls", "--origin", origin, **environment)
    assert len(listed["documents"]) == DOCUMENTS
    found = measured(tmp_path, f"{where} gc --dry-run", "gc", "--origin", origin, "--dry-run", **environment)
    assert (DOCUMENTS, CHAINS * 3, 0, []) == tuple(
        found[name] for name in ("documents", "blocks_kept", "blocks_removed", "skipped")
    )
    checked = measured(tmp_path, f"{where} fsck", "fsck", "--origin", origin, **environment)
    assert (DOCUMENTS, CHAINS * 3, []) == tuple(checked[name] for name in ("documents", "blocks", "problems"))


def test_a_sound_folder(tmp_path, sound) -> None:
    """On this machine's disk."""
    check_sound(tmp_path, "sound folder", str(sound))


def test_sound_s3(tmp_path, sound, tmp_path_factory) -> None:
    """In a bucket."""
    with _server(sound, tmp_path_factory) as running:
        check_sound(tmp_path, "sound s3", running.url(), **running.environment())
