"""The catalog of an origin: which models it has objects of, and what is published of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import CorruptError, NotFoundError, UsageError
from kvcdn.keys import block_key, manifest_key, model_tag
from kvcdn.manifest import MAX_MANIFEST_BYTES, Manifest, open_manifest
from kvcdn.store import BlobInfo, BlobStore

_DIGITS = "0123456789abcdef"

_BEHIND_TAGS = "g"
"""No tag comes behind it."""

_LAST = "~"
"""Comes behind all that keys are made of."""

_READERS = 8
"""Manifests read at once: they are small, so that a distant store is all waiting."""

_READ_AHEAD = 32
"""Manifests read before somebody takes them; each has at most 1 MiB, and mostly some kB."""

_SHOWN = 5
"""Names shown of many that fit."""

Progress = Callable[[str, int], None]
"""Told now and then what is being done and how much of it is done."""


def silent(_doing: str, _count: int) -> None:
    """A progress that nobody wants to see."""


@dataclass(frozen=True)
class Listed:
    """A manifest's object: what it holds, or why that cannot be told."""

    info: BlobInfo
    manifest: Manifest | None
    problem: CorruptError | None = None
    data: bytes = field(default=b"", repr=False)
    """The object itself, where it is sound."""


def model_tags(store: BlobStore) -> Iterator[ModelTag]:
    """The models that have objects at `store`, in order, without listing all of them."""
    after = ""
    while (info := next(iter(store.list("v1/", after)), None)) is not None:
        found = info.key.split("/")[1]
        if found > _BEHIND_TAGS:
            return
        tag = ModelTag.read(found)
        if tag is not None:
            yield tag
        after = f"v1/{found}/{_LAST}"


def manifest_infos(store: BlobStore, tag: ModelTag, start: str = "", after: str = "") -> Iterator[BlobInfo]:
    """The objects of a model's manifests whose address begins with `start`, in order; those behind the key `after`."""
    return (info for info in store.list(f"v1/{tag}/manifests/{start}", after) if address_of(info.key) is not None)


def block_infos(store: BlobStore, tag: ModelTag, start: str = "") -> Iterator[BlobInfo]:
    """The objects of a model's blocks whose address begins with `start`, in order."""
    folder = f"{start[:2]}/" if len(start) > 1 else ""  # as in `block_key`
    return (info for info in store.list(f"v1/{tag}/blocks/{folder}{start}") if address_of(info.key) is not None)


def address_of(key: str) -> Digest | None:
    """The address that an object key ends with."""
    return Digest.read(key.rpartition("/")[2])


def read_manifests(store: BlobStore, infos: Iterable[BlobInfo]) -> Iterator[Listed]:
    """Reads and checks manifests, several at once, in order. Those that are gone by then are left out."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="kvcdn-manifests") as pool:
        waiting: deque[Future[Listed | None]] = deque()
        try:
            for info in infos:
                waiting.append(pool.submit(read_manifest, store, info))
                if len(waiting) >= _READ_AHEAD and (found := waiting.popleft().result()):
                    yield found
            while waiting:
                if found := waiting.popleft().result():
                    yield found
        finally:
            for future in waiting:
                future.cancel()


def read_manifest(store: BlobStore, info: BlobInfo) -> Listed | None:
    """One manifest, or None where it is gone."""
    try:
        data = store.read(info.key, 0, MAX_MANIFEST_BYTES + 1)
        manifest = open_manifest(data, info.key)
        if manifest_key(manifest.tag, manifest.address) != info.key:
            raise CorruptError(f"{info.key}: another manifest lies under this name")
    except NotFoundError:
        return None
    except CorruptError as error:
        return Listed(info, None, error)
    return Listed(info, manifest, None, data)


def list_published(
    store: BlobStore, *, tag: ModelTag | None = None, after: str = "", progress: Progress = silent
) -> Iterator[Listed]:
    """Every manifest, or those of one model, in order of object key; only those behind the key `after`."""
    count = 0
    for each in [tag] if tag else model_tags(store):
        for listed in read_manifests(store, manifest_infos(store, each, after=after)):
            count += 1
            progress("manifests read", count)
            yield listed


def find_manifest(store: BlobStore, target: str) -> BlobInfo:
    """The one manifest at `target`: its address, the beginning of it, or its object key. Raises NotFoundError."""
    return _find(store, target, "document", {manifest_key: manifest_infos})


def find_object(store: BlobStore, target: str) -> BlobInfo:
    """The one manifest or block at `target`: its address, the beginning of it, or its object key. Raises NotFoundError."""
    return _find(store, target, "object", {manifest_key: manifest_infos, block_key: block_infos})


def _find(
    store: BlobStore,
    target: str,
    what: str,
    kinds: Mapping[Callable[[ModelTag, Digest], str], Callable[[BlobStore, ModelTag, str], Iterator[BlobInfo]]],
) -> BlobInfo:
    parts = target.split("/")
    if len(parts) > 1:
        address, tag = Digest.read(parts[-1]), ModelTag.read(parts[1])
        named = address is not None and tag is not None and target in [key(tag, address) for key in kinds]
        infos = [info] if named and (info := store.stat(target)) else []
    elif not target or set(target) - set(_DIGITS) or len(target) > 2 * Digest.SIZE:
        raise UsageError(f"{target[:80]!r} is not an address or the beginning of one", hint="kvcdn ls shows the addresses")
    else:
        found = (info for tag in model_tags(store) for infos_of in kinds.values() for info in infos_of(store, tag, target))
        infos = list(islice(found, 2))
    if len(infos) == 1:
        return infos[0]
    count = f"more than one {what}" if infos else f"no {what}"
    raise NotFoundError(
        f"{count} at {store.url} has an address that begins with {target!r}", hint="kvcdn ls shows the addresses"
    )


def find_model(store: BlobStore, model: str, progress: Progress = silent) -> ModelTag:
    """The tag of the model of this tag, fingerprint or name. Raises NotFoundError; UsageError where several have the name."""
    tag = tag_of(model)
    if tag is not None:
        if next(iter(store.list(f"v1/{tag}/")), None) is None:
            raise NotFoundError(f"{store.url} has no object of model {tag}", hint="kvcdn ls --json shows the models' tags")
        return tag
    named = [tag for tag in model_tags(store) if _has_name(store, tag, model, progress)]
    if len(named) == 1:
        return named[0]
    if not named:
        raise NotFoundError(f"nothing at {store.url} is of a model called {model!r}", hint="kvcdn ls shows the models")
    tags = ", ".join(str(tag) for tag in named[:_SHOWN])
    raise UsageError(f"{len(named)} models at {store.url} are called {model!r}: {tags}", hint="name one by its tag")


def tag_of(model: str) -> ModelTag | None:
    """The tag that a tag or a fingerprint says; None for a name."""
    fingerprint = Digest.read(model)
    return model_tag(fingerprint) if fingerprint else ModelTag.read(model)


def _has_name(store: BlobStore, tag: ModelTag, name: str, progress: Progress) -> bool:
    for count, listed in enumerate(read_manifests(store, manifest_infos(store, tag)), 1):
        progress("manifests read", count)
        if listed.manifest and listed.manifest.model_name == name:
            return True
    return False
