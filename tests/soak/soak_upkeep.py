"""Upkeep of a large origin: `ls`, `gc` and `journal verify` over 100,000 documents, in a folder and in a real S3 server.

Prints seconds, processor seconds and peak memory of each command, and checks what it found.

KVCDN_SOAK_DOCUMENTS=100000 pytest -s -p no:xdist --timeout 0 tests/soak/soak_upkeep.py
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcdn.digest import Digest, hash_bytes
from kvcdn.journal import START, Entry, Head, Published, chain_digest, journal_key
from kvcdn.keys import block_key, manifest_key
from kvcdn.manifest import BlockEntry, Manifest
from kvcdn.signing import SigningKey
from support.blocks import make_producer
from support.library import CREATED, small_model
from support.seaweed import S3Server, running_seaweed, weed_binary

DOCUMENTS = int(os.environ.get("KVCDN_SOAK_DOCUMENTS", "100000"))

BLOCKS = 4
"""Of each document, that no other has: upkeep holds their addresses. The objects are there for one document in ten."""

GARBAGE = 1000
"""Blocks that no document names."""

EXPIRED = 500
"""Documents whose time is over: gc removes them, and their blocks."""

MAX_BYTES = 700_000_000
"""Of memory that a command may take for 100,000 documents; an idle interpreter has 60 MB."""

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The origin as a folder: written without the care that real publishers take."""
    root = tmp_path_factory.mktemp("origin")
    for key, data in objects():
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
    """The same in S3, put there by the server's own tool: a client of S3 would take longer than what is measured."""
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        words = Path(f"/proc/{running.pid}/cmdline").read_bytes().decode().split("\0")
        ports = dict(word[1:].split("=", 1) for word in words if word.startswith("-filer.port"))
        target = f"http://127.0.0.1:{ports['filer.port']}.{ports['filer.port.grpc']}/buckets/{running.bucket}/"
        subprocess.run([weed_binary(), "filer.copy", "-c=16", folder / "v1", target], check=True, capture_output=True)
        yield running


def measured(tmp_path: Path, name: str, *words: object, **environment: str) -> dict:
    """Runs the installed program with --json, tells what it took, and gives what it printed."""
    program = Path(sys.executable).with_name("kvcdn")
    out, err = tmp_path / "out", tmp_path / "err"
    began = time.monotonic()
    with out.open("wb") as output, err.open("wb") as errors:
        process = subprocess.Popen(
            [str(program), *map(str, words), "--json"], stdout=output, stderr=errors, env={**os.environ, **environment}
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, peak = time.monotonic() - began, usage.ru_maxrss * 1024
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
