"""Dequantising where a cache lies: bytes are decoded on the host, the arithmetic of lossy codecs runs on the accelerator.

Of a grid the codes and their parameters go there, a half or a quarter of the tensor's bytes; of a transform its symbols, as
integers, whose products with the basis are most of the work. FORMAT.md fixes every bit (4.4, 4.5): each operation here is one
of float32 that rounds once, and the sums of the transform are exact in float64, whatever the user allowed float32 products to
be. What else there is, is decoded on the host, and copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcdn.codec import Rows, decode_part
from kvcdn.codecs.quant import GridPart, parse_grid
from kvcdn.codecs.rope import Rope
from kvcdn.codecs.transform import Components, parse_transform
from kvcdn.digest import Buffer
from kvcdn.model.prefill import tensor_bytes
from kvcdn.model.staging import Staging, Uploads

_NO_DOUBLES = ("mps",)
"""Devices that have no float64."""


def decode_to(
    place: torch.Tensor, codec: str, encoded: Buffer, rows: Rows, staging: Staging, uploads: Uploads, what: str
) -> None:
    """Fills `place`, a tensor of the part's shape, from a part's bytes. Raises CorruptError.

    To be called in the lane of the tensor's device. Where it lies on the CPU, it holds its numbers when this returns.
    """
    arithmetic = place.device.type not in _NO_DOUBLES
    if codec == "quant" and arithmetic:
        part = parse_grid(encoded, rows, what)
        first, last, parameters = len(part.lead), len(part.trail), part.checked(what)
        ends = _ends(place, first, last)
        _copy_bytes(ends[0], part.lead, staging)
        _copy_bytes(ends[2], part.trail, staging)
        if part.middle:
            _spread(ends[1], part, parameters, staging)
    elif codec == "tc" and arithmetic:
        exact, components = parse_transform(encoded, rows, what)
        ends = _ends(place, len(exact), 0)
        _copy_bytes(ends[0], exact, staging)
        if len(components.order):
            _restore(ends[1], components, rows, staging, uploads)
    else:
        room = staging.room(place)
        decode_part(codec, encoded, rows, tensor_bytes(room), what)
        place.copy_(room, non_blocking=True)


def _ends(place: torch.Tensor, lead: int, trail: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of the first `lead` bytes, those between, and those of the last `trail`."""
    row = place[0].nbytes
    first, last = lead // row, len(place) - trail // row
    return place[:first], place[first:last], place[last:]


def _copy_bytes(place: torch.Tensor, data: memoryview, staging: Staging) -> None:
    if len(data):
        room = staging.room(place)
        tensor_bytes(room)[:] = data
        place.copy_(room, non_blocking=True)


def _spread(place: torch.Tensor, part: GridPart, parameters: NDArray[np.float32], staging: Staging) -> None:
    """The numbers of codes (FORMAT.md 4.4)."""
    tokens, heads, dim = place.shape
    codes = staging.upload(np.frombuffer(part.codes, np.uint8), place.device)
    if part.bits == 4:  # noqa: PLR2004 - two to a byte
        codes = torch.cat([codes & 15, codes >> 4])[: place.numel()]
    values = codes.view(tokens, heads, -1, part.group_values).to(torch.float32)
    known = staging.upload(parameters, place.device)
    steps = _by_token(known[-1], part.group_tokens, tokens)
    offsets = steps * -float(1 << (part.bits - 1)) if len(known) == 1 else _by_token(known[0], part.group_tokens, tokens)
    _write_rounded((values * steps).add_(offsets).view(tokens, heads, dim), place)


def _by_token(parameters: torch.Tensor, group: int, tokens: int) -> torch.Tensor:
    """Parameters of groups of tokens, for each of the tokens."""
    return parameters.repeat_interleave(min(group, tokens), 0)[:tokens]


def _restore(place: torch.Tensor, found: Components, rows: Rows, staging: Staging, uploads: Uploads) -> None:
    """The numbers of components (FORMAT.md 4.5)."""
    (tokens, heads, dim), device, basis = place.shape, place.device, rows.basis
    groups, width, _ = basis.matrices.shape

    def there(array: NDArray[Any]) -> torch.Tensor:
        return staging.upload(array, device)

    symbols = torch.zeros((tokens, groups * width), dtype=torch.float64, device=device)
    symbols[:, there(found.which)] = there(found.symbols).to(torch.float64)
    matrices = uploads.kept(basis.matrices, staging, device).to(torch.float64)
    sums = torch.bmm(symbols.view(tokens, groups, width).transpose(0, 1), matrices).to(torch.float32)
    factors = there(found.steps)[None, :, None] * uploads.kept(basis.scales, staging, device)[:, None, None]
    numbers = torch.empty((tokens, heads, dim), dtype=torch.float32, device=device)
    numbers[there(found.order)] = (sums * factors).transpose(0, 1).reshape(tokens, heads, dim)
    numbers += uploads.kept(basis.mean, staging, device)
    if basis.rope is not None:
        cosines, sines = (there(part) for part in basis.rope.angles(rows.start + rows.shape[0] - tokens, tokens))
        _turn(numbers, basis.rope, cosines, sines)
    _write_rounded(numbers, place)


def _turn(numbers: torch.Tensor, rope: Rope, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotary embedding, as `kvcdn.codecs.rope` has it."""
    count = rope.pairs
    if rope.interleaved:
        first, second = numbers[..., : 2 * count : 2], numbers[..., 1 : 2 * count : 2]
    else:
        first, second = numbers[..., :count], numbers[..., count : 2 * count]
    # Products are rounded before they are added: each is an operation of its own.
    left = (first * cosines).sub_(second * sines)
    right = (second * cosines).add_(first * sines)
    first.copy_(left)
    second.copy_(right)


def _write_rounded(numbers: torch.Tensor, place: torch.Tensor) -> None:
    """Rounds float32 `numbers`, which are used up, into `place`. For bfloat16 ties go away from zero, unlike torch's own."""
    if place.dtype == torch.bfloat16:
        bits = numbers.view(torch.int32).add_(0x8000).bitwise_right_shift_(16)
        place.copy_(bits.to(torch.int16).view(torch.bfloat16))
    else:
        place.copy_(numbers)
