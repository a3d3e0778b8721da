"""The name of a basis: a digest and a length, by which it is found as a document of its own (FORMAT.md 4.6).

What the document holds is for kvcdn.codecs; here is only how it is cut into blocks and named.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Self

from kvcdn.digest import Digest
from kvcdn.fields import Fields
from kvcdn.keys import TRANSFORMED, ModelIdentity
from kvcdn.layout import LayerSpec, Layout, TensorSpec

MAX_BASIS_BYTES = 1 << 30
"""A basis of 100 layers with 8 heads of 128 dimensions, in groups of two heads, has 50 MB."""

BASIS_TOKEN_BYTES = 32_768
"""Bytes of a basis that each of its document's tokens carries."""

BASIS_LAYOUT = Layout(
    (LayerSpec("kv", (TensorSpec("k", 1, BASIS_TOKEN_BYTES // 2, "bfloat16"), TensorSpec("v", 1, 1, "bfloat16"))),)
)

_DIGEST_WORDS = struct.Struct("<8I")


@dataclass(frozen=True)
class BasisName:
    """Which basis: the digest of its bytes, and how many there are."""

    digest: Digest
    size: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of its document: the digest's eight words, repeated until they carry all bytes; at least eight."""
        words = _DIGEST_WORDS.unpack(self.digest)
        return tuple(words[index % 8] for index in range(max(-(-self.size // BASIS_TOKEN_BYTES), 8)))

    def identity(self, model: ModelIdentity) -> ModelIdentity:
        """Under which its document is published: the model's fingerprint, the layout of a basis, native precision."""
        return ModelIdentity(model.fingerprint, BASIS_LAYOUT, model.name)

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.size, "digest": str(self.digest)}

    @classmethod
    def from_json(cls, value: Any, what: str) -> Self:
        """Raises CorruptError for anything else."""
        fields = Fields(value, f"{what}: basis")
        name = cls(fields.fixed("digest", Digest), fields.integer("bytes", 1, MAX_BASIS_BYTES))
        fields.done()
        return name


def read_basis_name(fields: Fields, precision: str, what: str) -> BasisName | None:
    """The header's field: there in a precision that needs a basis, and only there. Raises CorruptError."""
    return BasisName.from_json(fields.any("basis"), what) if precision in TRANSFORMED else None
