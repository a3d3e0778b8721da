"""The publisher's choice of grids: what int8 and int4 do to each tensor (FORMAT.md 4.4 says only what a reader must know)."""

from __future__ import annotations

from kvcdn.codec import Buffer, Encoded, Rows
from kvcdn.codecs.quant import Grid, encode_grid
from kvcdn.keys import EXACT_TOKENS, BlockName
from kvcdn.layout import TensorSpec

BITS = {"int8": 8, "int4": 4}
"""Bits of a code in each precision."""

RECENT_TOKENS = 16
"""The last tokens of a document are exact as well: what follows reads them most."""

KEY_GROUP_TOKENS = {8: 128, 4: 32}
"""Tokens that share one step for a channel of K: channels differ by orders of magnitude, tokens within one do not."""


def choose_grid(name: str, bits: int, dim: int, *, first: bool, last: bool) -> Grid:
    """The grid of tensor `name` ("k" or "v") in the document's `first` or `last` block."""
    lead, trail = EXACT_TOKENS if first else 0, RECENT_TOKENS if last else 0
    coarse = bits < max(KEY_GROUP_TOKENS)
    if name == "k":
        return Grid(bits, KEY_GROUP_TOKENS[4 if coarse else 8], 1, centred=False, lead=lead, trail=trail)
    return Grid(bits, 1, 32 if coarse and dim % 32 == 0 else dim, centred=False, lead=lead, trail=trail)


def encode_tensor(raw: Buffer, spec: TensorSpec, name: BlockName, precision: str, *, last: bool) -> Buffer | Encoded:
    """`raw`, the tensor `spec` of the block `name`, in a lossy precision; `last` says that the document ends with the block.

    Where it cannot be put on a grid, or that is not smaller, it is left as it is, for a lossless codec.
    """
    grid = choose_grid(spec.name, BITS[precision], spec.dim, first=name.start == 0, last=last)
    encoded = encode_grid(raw, Rows(spec.dtype, spec.shape(name.tokens)), grid)
    return raw if encoded is None or len(encoded.data) >= len(raw) else encoded
