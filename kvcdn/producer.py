"""Producer: what computed a block and on which schedule; recorded, signed, and what `verify` repeats."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvcdn.fields import Fields
from kvcdn.layout import MAX_BLOCK_TOKENS

MAX_TEXT = 256
"""Characters of each free-text field."""


@dataclass(frozen=True)
class Producer:
    """Libraries' versions, device, attention kernel, and the tokens of one forward pass."""

    torch: str
    transformers: str
    device: str
    attention: str
    chunk_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, what: str) -> Producer:
        """Raises CorruptError for anything that is not a producer."""
        fields = Fields(value, f"{what}: producer")
        producer = cls(
            torch=fields.string("torch", MAX_TEXT),
            transformers=fields.string("transformers", MAX_TEXT),
            device=fields.string("device", MAX_TEXT),
            attention=fields.string("attention", MAX_TEXT),
            chunk_tokens=fields.integer("chunk_tokens", 1, MAX_BLOCK_TOKENS),
        )
        fields.done()
        return producer
