"""A library of tiny documents that begin alike, and a publisher that can be watched step by step.

A document is written as the choices of its blocks: (1, 2) and (1, 3) share their first block. A block is 1,024 tokens of four
bytes each, sealed as real ones are.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from kvcdn.block import seal_block
from kvcdn.digest import Digest, hash_bytes
from kvcdn.keys import ModelIdentity, Namespace, PrefixNames, block_key, manifest_key
from kvcdn.layout import Layout
from kvcdn.manifest import BlockEntry, Manifest
from kvcdn.origin.upkeep.lease import Lease
from kvcdn.origin.upkeep.whole import read_header
from kvcdn.signing import SigningKey
from kvcdn.store import BlobInfo, BlobStore
from support.blocks import make_producer

CREATED = 1_700_000_000

Spec = tuple[int, ...]


def small_model(seed: int = 0) -> ModelIdentity:
    """A model of one layer, one head, one dimension: blocks of 4 kB."""
    return ModelIdentity(Digest(hash_bytes(b"small model %d" % seed)), Layout.uniform_kv(1, 1, 1, "float16"), f"small-{seed}")


class Library:
    """Publishes documents of one model into a store, as `kvcdn.origin.publishing.publish` does, without a model."""

    def __init__(self, store: BlobStore, *, model: ModelIdentity | None = None, key: SigningKey | None = None) -> None:
        self.store = store
        self.model = model or small_model()
        self.key = key or SigningKey.generate()
        self._names: dict[Spec, PrefixNames] = {}

    @property
    def tag(self):
        return self.model.tag

    def names(self, spec: Spec) -> PrefixNames:
        if spec not in self._names:
            length = self.model.layout.block_tokens
            token_ids = [choice for choice in spec for _ in range(length)]
            self._names[spec] = PrefixNames.of(self.model, Namespace.public(), token_ids)
        return self._names[spec]

    def manifest_key(self, spec: Spec) -> str:
        return manifest_key(self.tag, self.names(spec).manifest_address)

    def address(self, spec: Spec) -> str:
        return str(self.names(spec).manifest_address)

    def block_keys(self, spec: Spec) -> list[str]:
        return [block_key(self.tag, name.address) for name in self.names(spec).blocks]

    def publish(self, *specs: Spec, expires: int | None = None, label: str = "") -> None:
        for spec in specs:
            for _ in self.steps(spec, expires=expires, label=label):
                pass

    def write_blocks(self, spec: Spec) -> None:
        """What a publisher leaves that was interrupted before its manifest, a day ago: no lease."""
        for index in range(len(spec)):
            self._entry(spec, index)

    def steps(self, spec: Spec, *, expires: int | None = None, label: str = "") -> Iterator[str]:
        """A publisher at work; it pauses before everything that others may see or change."""
        names = self.names(spec)
        lease = Lease(self.store, self.tag, [name.address for name in names.blocks])
        lease.take()
        yield "lease taken"
        while lease.blocked():
            yield "waiting"
        entries = []
        for index, key in enumerate(self.block_keys(spec)):
            yield "before looking"
            if self.store.stat(key) is None:
                yield "computing"
            entries.append(self._entry(spec, index))
        yield "before the manifest"
        lease.require()
        manifest = Manifest(
            address=names.manifest_address,
            fingerprint=self.model.fingerprint,
            model_name=self.model.name,
            layout=self.model.layout,
            precision=self.model.precision,
            tokens=names.tokens,
            blocks=tuple(entries),
            created=CREATED,
            expires=expires,
            label=label,
            producer=make_producer(self.model),
        )
        self.store.create(self.manifest_key(spec), [manifest.seal(self.key)])
        yield "published"
        lease.release()

    def _entry(self, spec: Spec, index: int) -> BlockEntry:
        name, key = self.names(spec).blocks[index], self.block_keys(spec)[index]
        raw = [[random.Random(spec[index]).randbytes(2 * name.tokens) for _ in "kv"]]
        if self.store.stat(key) is None:
            self.store.create(key, seal_block(self.model, name, make_producer(self.model), raw, self.key))
        header = read_header(self.store, key)
        return BlockEntry(name.address, name.tokens, header.size, header.etag)


class Watched:
    """A store that says before each operation what comes; the listener may raise, or do something else first."""

    def __init__(self, store: BlobStore, listener: Callable[[str, str], None]) -> None:
        self._store = store
        self._listener = listener

    @property
    def url(self) -> str:
        return self._store.url

    def stat(self, key: str) -> BlobInfo | None:
        self._listener("stat", key)
        return self._store.stat(key)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._listener("read", key)
        return self._store.read(key, start, length)

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        self._listener("stream", key)
        return self._store.stream(key, start, length)

    def create(self, key: str, pieces: Sequence[bytes]) -> bool:
        self._listener("create", key)
        return self._store.create(key, pieces)

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        self._listener("list", prefix)
        for info in self._store.list(prefix, after):
            yield info
            self._listener("list", prefix)

    def delete(self, key: str) -> None:
        self._listener("delete", key)
        self._store.delete(key)


class SerialPool:
    """In place of a thread pool: everything in order, so that a failing run can be repeated."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function, *arguments):
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - as a pool does
            future.set_exception(error)
        return future

    def map(self, function, values):
        return [function(value) for value in values]


@contextlib.contextmanager
def in_order(monkeypatch) -> Iterator[None]:
    """Everything of `kvcdn.origin` that uses threads does without, until the block ends."""
    with monkeypatch.context() as patched:
        for module in ("catalog", "sweep", "check", "copy"):
            patched.setattr(f"kvcdn.origin.upkeep.{module}.ThreadPoolExecutor", SerialPool)
        yield


def keys(store: BlobStore, part: str = "") -> list[str]:
    """Every object key but those of the journal, or those that hold `part`."""
    return [info.key for info in store.list("") if part in info.key and not info.key.startswith("v1/journal/")]
