"""Names and keys of a prefix: seed, chain, addresses, content keys (FORMAT.md 2.5) and object keys (2.6).

The chain hashes are secrets: whoever can compute one has the text. From each follow, by domain separation, an address that
everyone may see and a content key that opens the block.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcdn.digest import Digest, ModelTag, Secret, derive
from kvcdn.errors import UsageError
from kvcdn.layout import Layout

PRECISION_NATIVE = "native"
"""The KV exactly as the model computed it, in the layout's dtypes."""

TRANSFORMED = ("tc-high", "tc-medium", "tc-low", "tc-least")
"""Precisions that need the model's basis."""

LOSSY = ("int8", "int4", *TRANSFORMED)
"""Precisions whose KV is near the exact one."""


def refinement_of(precision: str) -> str:
    """The precision of what makes the lossy `precision` exact."""
    return f"{precision}+"


COARSE_OF = {refinement_of(precision): precision for precision in LOSSY}
"""Refinements, each with the lossy precision that it makes exact: their blocks hold what that one's lack."""

PRECISIONS = (PRECISION_NATIVE, *LOSSY, *COARSE_OF)
"""How KV is kept (FORMAT.md 2.5). The precision is in the seed of every name, so that no chain holds blocks of two."""

EXACT_TOKENS = 4
"""Tokens at the beginning of a prefix that are exact in every precision: all others read them, and readers try them."""

MAX_PREFIX_TOKENS = 1 << 24
"""Longest prefix a manifest may describe: far above any model's positions."""

NAMESPACE_SECRET_MIN_BYTES = 32
"""Shorter secrets could be guessed together with the text."""

PUBLIC_NAMESPACE = bytes(32)


@dataclass(frozen=True)
class Namespace:
    """Who can find a document: everyone with the text, or only those who also hold a secret."""

    key: bytes
    name: str = "public"

    @classmethod
    def public(cls) -> Namespace:
        return cls(PUBLIC_NAMESPACE)

    @classmethod
    def private(cls, name: str, secret: bytes) -> Namespace:
        """Raises UsageError for a secret under 32 bytes."""
        if len(secret) < NAMESPACE_SECRET_MIN_BYTES:
            raise UsageError(
                f"the secret of namespace {name!r} has {len(secret)} bytes; at least {NAMESPACE_SECRET_MIN_BYTES} are needed",
                hint=f"make one with: kvcdn keygen --namespace {name}",
            )
        return cls(derive("kvcdn v1 namespace", secret), name)

    def __repr__(self) -> str:
        return f"Namespace({self.name})"


@dataclass(frozen=True)
class ModelIdentity:
    """What binds a KV cache to a model: its fingerprint, the layout of its cache, and the precision."""

    fingerprint: Digest
    layout: Layout
    name: str
    precision: str = PRECISION_NATIVE

    @property
    def tag(self) -> ModelTag:
        return model_tag(self.fingerprint)

    def seed(self, namespace: Namespace) -> Secret:
        """h_0 of FORMAT.md 2.5."""
        material = self.fingerprint + self.layout.digest + namespace.key + self.precision.encode("ascii")
        return Secret(derive("kvcdn v1 seed", material))


@dataclass(frozen=True)
class BlockName:
    """One block of a prefix: where its tokens are, its public address, and the key that opens it."""

    index: int
    start: int
    tokens: int
    address: Digest
    content_key: Secret
    coarse: BlockName | None = None
    """Of a refinement: the block of the same tokens that it makes exact."""

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class PrefixNames:
    """Every name of one prefix, from one walk along its chain."""

    model: ModelIdentity
    blocks: tuple[BlockName, ...]
    manifest_address: Digest
    tokens: int

    @classmethod
    def of(cls, model: ModelIdentity, namespace: Namespace, token_ids: Sequence[int]) -> PrefixNames:
        """Names the whole of `token_ids`; see `Chain`."""
        return Chain(model, namespace, token_ids).prefix(len(token_ids))


class Chain:
    """The chain of a prompt: hashed once, it names every prefix of it."""

    def __init__(self, model: ModelIdentity, namespace: Namespace, token_ids: Sequence[int]) -> None:
        """Takes 1 or more ids below 2^32. Raises UsageError for an empty, oversized or otherwise impossible list."""
        if not 1 <= len(token_ids) <= MAX_PREFIX_TOKENS:
            raise UsageError(f"a prefix has 1 to {MAX_PREFIX_TOKENS} tokens, not {len(token_ids)}")
        self.model = model
        self.tokens = len(token_ids)
        self.block_tokens = model.layout.block_tokens
        self._packed = _pack(token_ids)
        self._links = [model.seed(namespace)]
        coarse = COARSE_OF.get(model.precision)
        self._coarse = None if coarse is None else Chain(replace(model, precision=coarse), namespace, token_ids)
        self._whole: list[BlockName] = []
        for start in range(0, self.tokens - self.block_tokens + 1, self.block_tokens):
            name, link = self._step(start, start + self.block_tokens)
            self._whole.append(name)
            self._links.append(link)

    def prefix(self, tokens: int) -> PrefixNames:
        """Names the first `tokens` (1 or more) tokens as a document of their own. Raises UsageError for more than there are."""
        if not 1 <= tokens <= self.tokens:
            raise UsageError(f"a prompt of {self.tokens} tokens has no prefix of {tokens}")
        whole, rest = divmod(tokens, self.block_tokens)
        blocks, link = self._whole[:whole], self._links[whole]
        if rest:
            tail, link = self._step(whole * self.block_tokens, tokens)
            blocks = [*blocks, tail]
        manifest = Digest(derive("kvcdn v1 manifest address", link))
        return PrefixNames(self.model, tuple(blocks), manifest, tokens)

    def block(self, start: int, end: int) -> BlockName:
        """Names the block of the tokens from `start`, a multiple of the block length, to `end`."""
        return self._step(start, end)[0]

    def _step(self, start: int, end: int) -> tuple[BlockName, Secret]:
        index = start // self.block_tokens
        link = Secret(
            derive("kvcdn v1 chain", self._links[index] + struct.pack("<I", end - start) + self._packed[4 * start : 4 * end])
        )
        address = Digest(derive("kvcdn v1 block address", link))
        coarse = self._coarse.block(start, end) if self._coarse else None
        return BlockName(index, start, end - start, address, Secret(derive("kvcdn v1 content key", link)), coarse), link


def _pack(token_ids: Sequence[int]) -> bytes:
    """u32le of each id."""
    try:
        packed = array("I", iter(token_ids))  # of a bytes object, array() would take the memory instead of the items
    except (OverflowError, TypeError):
        raise UsageError("token ids must be integers from 0 to 4294967295") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def read_precisions(precisions: str | Sequence[str]) -> tuple[str, ...]:
    """A list of precisions, each once, also as one string with commas. Raises UsageError."""
    names = tuple(precisions.split(",")) if isinstance(precisions, str) else tuple(precisions)
    for name in names:
        if name not in PRECISIONS:
            raise UsageError(f"there is no precision {name!r}", hint=f"there are {', '.join(PRECISIONS)}")
    if not names or len(set(names)) < len(names):
        raise UsageError("a list of precisions names at least one, and each once")
    return names


def with_refinements(names: Sequence[str]) -> tuple[str, ...]:
    """`names` with the refinement of each lossy one before it. Raises UsageError where none is lossy."""
    if not set(names) & set(LOSSY):
        raise UsageError(
            "exact KV alone has no coarse part that could come first", hint=f"accept one of {', '.join(LOSSY)} too"
        )
    found: list[str] = []
    for name in names:
        found += [refinement_of(name), name] if name in LOSSY else [name]
    return tuple(dict.fromkeys(found))


def model_tag(fingerprint: Digest) -> ModelTag:
    """The 16 bytes under which a model's objects lie (FORMAT.md 2.1)."""
    return ModelTag(derive("kvcdn v1 model tag", fingerprint)[: ModelTag.SIZE])


def block_key(tag: ModelTag, address: Digest) -> str:
    """The object key of a block (FORMAT.md 2.6)."""
    text = str(address)
    return f"v1/{tag}/blocks/{text[:2]}/{text}"


def manifest_key(tag: ModelTag, address: Digest) -> str:
    """The object key of a manifest (FORMAT.md 2.6)."""
    return f"v1/{tag}/manifests/{address}"
