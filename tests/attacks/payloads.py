"""Payloads of lossy codecs, by a publisher who may seal what it likes: each is refused before it can do harm."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvcdn.codec import CODECS, Rows
from kvcdn.codecs.quant import Grid, encode_grid

ROWS = Rows("bfloat16", (40, 2, 16))

VALUES = np.random.default_rng(5).normal(size=ROWS.shape).astype("<f4")

RAW = (VALUES.view("<u4") >> 16).astype("<u2").tobytes()

HEADER_BYTES = 16

ROW_BYTES = 2 * 16 * 2


@dataclass(frozen=True)
class Payload:
    """Hostile bytes of a part of `ROWS`, and a part of the message of the check that stops them."""

    name: str
    codec: str
    data: bytes
    says: str


def sound_grid(grid: Grid) -> bytes:
    """An honest payload."""
    encoded = encode_grid(RAW, ROWS, grid)
    assert encoded is not None
    return encoded.data


def with_field(data: bytes, form: str, offset: int, value: int) -> bytes:
    """`data` with one number of its header replaced."""
    changed = bytearray(data)
    struct.pack_into(form, changed, offset, value)
    return bytes(changed)


def grid_payloads() -> Iterator[Payload]:
    """Hostile numbers on grids (FORMAT.md 4.4)."""
    sound = sound_grid(Grid(4, 8, 1, centred=False, lead=3, trail=2))
    impossible = "grid, or its sizes, are not possible"
    changes = {
        "no-bits": ("B", 0, 0),
        "one-bit": ("B", 0, 1),
        "nine-bits": ("B", 0, 9),
        "centred-twice": ("B", 1, 2),
        "more-exact-rows-than-tokens": ("B", 2, 255),
        "exact-rows-that-are-not-there": ("B", 3, 3),
        "groups-of-no-tokens": ("<H", 4, 0),
        "groups-of-no-values": ("<H", 6, 0),
        "groups-of-3-of-16-values": ("<H", 6, 3),
        "groups-wider-than-a-head": ("<H", 6, 32),
        "parameters-of-4-GiB": ("<I", 8, 2**32 - 1),
        "codes-of-4-GiB": ("<I", 12, 2**32 - 1),
        "no-parameters": ("<I", 8, 0),
    }
    for name, (form, offset, value) in changes.items():
        yield Payload(f"quant-{name}", "quant", with_field(sound, form, offset, value), impossible)
    yield Payload("quant-empty", "quant", b"", "too few")
    yield Payload("quant-header-cut", "quant", sound[:15], "too few")
    yield Payload("quant-trailing-byte", "quant", sound + b"\0", impossible)
    yield Payload("quant-cut", "quant", sound[:-1], impossible)
    yield from _grid_streams()


def _grid_streams() -> Iterator[Payload]:
    """Streams that do not fit, and parameters that are no numbers; one step for each of the 2 heads, 40 x 32 codes."""
    codes = bytes(range(16)) * 80
    for name, step, says in (
        ("infinite-step", 0x7F80, "not a number that belongs there"),
        ("step-that-is-no-number", 0x7FC1, "not a number that belongs there"),
        ("negative-step", 0xBF80, "not a number that belongs there"),
        ("step-of-minus-zero", 0x8000, "not a number that belongs there"),
    ):
        yield Payload(f"quant-{name}", "quant", _centred(struct.pack("<HH", 0x3F80, step), codes), says)
    steps = struct.pack("<HH", 0x3F80, 0x3F80)
    yield Payload("quant-fewer-codes", "quant", _centred(steps, codes[:-1]), "blosc2 chunk")
    yield Payload("quant-no-codes", "quant", _centred(steps, b""), "too short")
    yield Payload("quant-more-codes", "quant", _centred(steps, codes + codes), "blosc2 chunk")
    yield Payload("quant-fewer-steps", "quant", _centred(steps[:2], codes), "too short")
    bomb = CODECS["blosc2"].encode(bytes(1 << 20), 1)
    yield Payload("quant-bomb", "quant", _centred(steps, bomb), "blosc2 chunk says")


def _centred(steps: bytes, codes: bytes) -> bytes:
    return struct.pack("<BBBBHHII", 4, 1, 0, 0, 40, 16, len(steps), len(codes)) + steps + codes


def payloads() -> list[Payload]:
    """All of them."""
    return list(grid_payloads())
