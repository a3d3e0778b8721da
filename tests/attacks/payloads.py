"""Payloads of lossy codecs, by a publisher who may seal what it likes: each is refused before it can do harm."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvcdn.codec import CODECS, PLAIN_CHUNK, Rows
from kvcdn.codecs.exponents import encode_exponents
from kvcdn.codecs.quant import Grid, encode_grid
from kvcdn.codecs.rest import encode_rest
from kvcdn.codecs.symbols import pack_symbols
from kvcdn.codecs.transform import encode_transform
from kvcdn.layout import Layout
from support.blocks import make_basis

ROWS = Rows("bfloat16", (40, 2, 16))

VALUES = np.random.default_rng(5).normal(size=ROWS.shape).astype("<f4")

RAW = (VALUES.view("<u4") >> 16).astype("<u2").tobytes()

LAYOUT = Layout.uniform_kv(1, 2, 16, "bfloat16")

BASIS = make_basis(LAYOUT)

COARSE = ((VALUES * 1.01).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()

COMPONENT_ROWS = Rows(ROWS.dtype, ROWS.shape, 100, BASIS.tensors[0][0], COARSE)

EXPONENTS = np.random.default_rng(6).integers(-2, 3, 40, np.int16)

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
    impossible, sizes = "grid is not possible", "belong"
    changes = {
        "no-bits": ("B", 0, 0, impossible),
        "one-bit": ("B", 0, 1, impossible),
        "five-bits": ("B", 0, 5, impossible),
        "nine-bits": ("B", 0, 9, impossible),
        "twice-the-bits": ("B", 0, 8, sizes),
        "centred-twice": ("B", 1, 2, impossible),
        "centred-after-all": ("B", 1, 1, sizes),
        "more-exact-rows-than-tokens": ("B", 2, 255, impossible),
        "exact-rows-that-are-not-there": ("B", 3, 3, sizes),
        "groups-of-no-tokens": ("<H", 4, 0, impossible),
        "groups-of-one-token": ("<H", 4, 1, sizes),
        "groups-of-no-values": ("<H", 6, 0, impossible),
        "groups-of-3-of-16-values": ("<H", 6, 3, impossible),
        "groups-wider-than-a-head": ("<H", 6, 32, impossible),
        "groups-of-two-values": ("<H", 6, 2, sizes),
    }
    for name, (form, offset, value, says) in changes.items():
        yield Payload(f"quant-{name}", "quant", with_field(sound, form, offset, value), says)
    yield Payload("quant-empty", "quant", b"", "too few")
    yield Payload("quant-header-cut", "quant", sound[:7], "too few")
    yield Payload("quant-header-alone", "quant", sound[:8], sizes)
    yield Payload("quant-trailing-byte", "quant", sound + b"\0", sizes)
    yield Payload("quant-cut", "quant", sound[:-1], sizes)
    yield from _grid_parameters()


def _grid_parameters() -> Iterator[Payload]:
    """Parameters that are no numbers, or too few; one step for each of the 2 heads, 40 x 32 codes of 4 bits."""
    codes = bytes(range(16)) * 40
    for name, step in (
        ("infinite-step", 0x7F80),
        ("step-that-is-no-number", 0x7FC1),
        ("negative-step", 0xBF80),
        ("step-of-minus-zero", 0x8000),
    ):
        data = _centred(struct.pack("<HH", 0x3F80, step), codes)
        yield Payload(f"quant-{name}", "quant", data, "not a number that belongs there")
    steps = struct.pack("<HH", 0x3F80, 0x3F80)
    yield Payload("quant-fewer-codes", "quant", _centred(steps, codes[:-1]), "belong")
    yield Payload("quant-no-codes", "quant", _centred(steps, b""), "belong")
    yield Payload("quant-more-codes", "quant", _centred(steps, codes + codes), "belong")
    yield Payload("quant-fewer-steps", "quant", _centred(steps[:2], codes), "belong")
    yield Payload("quant-compressed", "quant", _centred(steps, CODECS["blosc2"].encode(codes, 1)), "belong")


def _centred(steps: bytes, codes: bytes) -> bytes:
    return struct.pack("<BBBBHH", 4, 1, 0, 0, 40, 16) + steps + codes


def sound_components() -> bytes:
    """An honest payload of the transform codec."""
    encoded = encode_transform(RAW, COMPONENT_ROWS, EXPONENTS, 0.1, lead=3)
    assert encoded is not None
    return encoded.data


def component_payloads() -> Iterator[Payload]:
    """Hostile components (FORMAT.md 4.5)."""
    sound = sound_components()
    impossible = "components' step, or their sizes, are not possible"
    changes = {
        "more-exact-rows-than-tokens": ("<H", 0, 41),
        "exact-rows-to-the-end": ("<H", 0, 65_535),
        "17-classes": ("<H", 2, 17),
        "65535-classes": ("<H", 2, 65_535),
        "first-stream-of-4-GiB": ("<I", 8 + 3 * ROW_BYTES, 2**32 - 1),
    }
    for name, (form, offset, value) in changes.items():
        yield Payload(f"tc-{name}", "tc", with_field(sound, form, offset, value), impossible)
    for name, step in (("zero", 0.0), ("negative", -1.0), ("infinite", float("inf")), ("no-number", float("nan"))):
        changed = bytearray(sound)
        struct.pack_into("<f", changed, 4, step)
        yield Payload(f"tc-step-{name}", "tc", bytes(changed), impossible)
    yield Payload("tc-empty", "tc", b"", "too few")
    yield Payload("tc-header-cut", "tc", sound[:7], "too few")
    yield Payload("tc-trailing-byte", "tc", sound + b"\0", impossible)
    yield Payload("tc-cut", "tc", sound[:-1], impossible)
    yield from _component_streams()


def _component_streams() -> Iterator[Payload]:
    exponents, levels = np.zeros(40, np.int16), np.zeros(32, np.int16)
    symbols = np.ones(40 * 32, np.int16)
    sides, stream = [pack_symbols(exponents), pack_symbols(levels)], pack_symbols(symbols)
    range_ = "out of range"
    yield Payload("tc-exponent-9", "tc", _components([pack_symbols(exponents + 9), sides[1], stream]), range_)
    yield Payload(
        "tc-exponent-least", "tc", _components([pack_symbols(exponents | np.int16(-32_768)), sides[1], stream]), range_
    )
    yield Payload("tc-level-64", "tc", _components([sides[0], pack_symbols(levels + 64), stream]), range_)
    yield Payload("tc-level-least", "tc", _components([sides[0], pack_symbols(levels | np.int16(-32_768)), stream]), range_)
    yield Payload("tc-class-missing", "tc", _components(sides), "0 classes of symbols, 1 belong")
    yield Payload("tc-class-too-many", "tc", _components([*sides, stream, stream]), "2 classes of symbols, 1 belong")
    spread = np.arange(32, dtype=np.int16)
    wide = [sides[0], pack_symbols(spread), *[pack_symbols(symbols[:40])] * 16]
    yield Payload("tc-more-classes-than-there-are", "tc", _components(wide), "32 belong")
    yield Payload("tc-exponents-missing", "tc", _components([b"", sides[1], stream]), "does not allow")
    yield Payload("tc-stream-with-a-tail", "tc", _components([*sides, stream + b"\0"]), "of them used")
    yield Payload("tc-stream-cut", "tc", _components([*sides, stream[:-2]]), "stream of symbols")
    yield Payload("tc-stream-of-another-version", "tc", _components([*sides, b"\x09" + stream[1:]]), "does not allow")
    for mode in (0x01, 0x02, 0x03, 0x10, 0x20, 0xFF):
        data = stream[:2] + bytes([mode]) + stream[3:]
        yield Payload(f"tc-stream-in-mode-{mode:02x}", "tc", _components([*sides, data]), "does not allow")


def _components(streams: list[bytes]) -> bytes:
    lengths = b"".join(struct.pack("<I", len(stream)) for stream in streams)
    return struct.pack("<HHf", 0, len(streams) - 2, 1.0) + lengths + b"".join(streams)


def exponent_payloads() -> Iterator[Payload]:
    """Hostile exponents apart (FORMAT.md 4.3): 40 x 32 numbers."""
    numbers = np.frombuffer(RAW, "<u2").copy()
    numbers[[7, 900]] = 0
    sound = encode_exponents(numbers.tobytes(), COMPONENT_ROWS)
    assert sound is not None
    begin = 4 + 5 * struct.unpack_from("<I", sound)[0]
    bases, chunk = sound[begin : begin + 32], sound[begin + 32 + 1280 :]
    kept = sound[begin + 32 : begin + 32 + 1280]
    short, range_ = "too few", "out of range"

    def written(strays: bytes, ours: bytes = bases, codes: bytes = chunk) -> bytes:
        return strays + ours + kept + codes

    def strays(*places: int) -> bytes:
        return struct.pack(f"<I{len(places)}I", len(places), *places) + bytes(len(places))

    found = {
        "empty": (b"", short),
        "count-cut": (sound[:3], short),
        "count-alone": (bytes(4), short),
        "more-exceptions-than-numbers": (struct.pack("<I", 1281) + bytes(20_000), short),
        "4-G-exceptions": (struct.pack("<I", 2**32 - 1) + sound[4:], short),
        "exception-behind-the-end": (written(strays(1280)), range_),
        "exception-far-behind-the-end": (written(strays(7, 2**32 - 1)), range_),
        "exceptions-descending": (written(strays(9, 7)), range_),
        "exception-twice": (written(strays(7, 7)), range_),
        "base-of-241": (written(strays(7), bytes([241]) * 32), range_),
        "no-codes": (written(strays(7), codes=b""), "too short"),
        "codes-cut": (sound[:-1], "blosc2 chunk"),
        "trailing-byte": (sound + b"\0", "blosc2 chunk"),
        "codes-of-a-row-less": (written(strays(7), codes=PLAIN_CHUNK.encode(bytes(19 * 32), 1)), "raw bytes in blocks"),
        "a-code-a-byte": (written(strays(7), codes=PLAIN_CHUNK.encode(bytes(1280), 1)), "raw bytes in blocks"),
        "codes-of-two-bytes": (written(strays(7), codes=PLAIN_CHUNK.encode(bytes(640), 2)), "typesize"),
        "codes-shuffled": (written(strays(7), codes=CODECS["blosc2"].encode(bytes(range(160)) * 4, 1)), "does not allow"),
    }
    for name, (data, says) in found.items():
        yield Payload(f"exponents-{name}", "exponents", data, says)


def rest_payloads() -> Iterator[Payload]:
    """Hostile refinements (FORMAT.md 4.7)."""
    encoded = encode_rest(RAW, COMPONENT_ROWS)
    assert encoded is not None
    sound = encoded.data
    lengths, streams = list(struct.unpack_from("<12I", sound)), sound[48:]
    symbols = "stream of"

    def with_lengths(*changed: int) -> bytes:
        return struct.pack("<12I", *changed) + streams

    yield Payload("rest-empty", "rest", b"", "too few")
    yield Payload("rest-lengths-cut", "rest", sound[:47], "too few")
    yield Payload("rest-lengths-alone", "rest", sound[:48], "belong")
    yield Payload("rest-cut", "rest", sound[:-1], "belong")
    yield Payload("rest-trailing-byte", "rest", sound + b"\0", "belong")
    yield Payload("rest-stream-of-4-GiB", "rest", with_field(sound, "<I", 0, 2**32 - 1), "belong")
    yield Payload("rest-streams-swapped", "rest", with_lengths(lengths[1], lengths[0], *lengths[2:]), symbols)
    yield Payload("rest-all-in-one-stream", "rest", with_lengths(len(streams), *[0] * 11), symbols)
    yield Payload("rest-nothing-in-streams", "rest", struct.pack("<12I", *[0] * 12), symbols)
    for mode in (0x01, 0x10, 0xFF):
        data = sound[:50] + bytes([mode]) + sound[51:]
        yield Payload(f"rest-stream-in-mode-{mode:02x}", "rest", data, "does not allow")


def payloads() -> list[Payload]:
    """All of them."""
    return [*grid_payloads(), *component_payloads(), *exponent_payloads(), *rest_payloads()]
