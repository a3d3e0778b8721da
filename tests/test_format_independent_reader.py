"""A second reader of the format, written from FORMAT.md alone: where it and the package disagree, one of them is wrong.

It imports nothing from the package, shares no code with it, and is strict where the text is strict. It reads the golden
vectors, documents that the package has just written, and refuses every hostile file that the package refuses.
"""

from __future__ import annotations

import ast
import base64
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import pytest
from blake3 import blake3
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pcodec.wrapped import FileDecompressor

VECTORS = Path(__file__).parent / "vectors"

DTYPE_SIZE = {"bfloat16": 2, "float16": 2, "float32": 4}

HEX32 = re.compile(r"[0-9a-f]{64}", re.ASCII)
HEX16 = re.compile(r"[0-9a-f]{32}", re.ASCII)


class RefusedError(Exception):
    """The bytes are not what FORMAT.md describes."""


def require(condition: object, reason: str) -> None:
    if not condition:
        raise RefusedError(reason)


# Section 1: conventions.


def derive(context: str, material: bytes) -> bytes:
    return blake3(material, derive_key_context=context).digest()


def u32le(number: int) -> bytes:
    return number.to_bytes(4, "little")


SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def write_string(text: str) -> str:
    pieces = []
    for character in text:
        code = ord(character)
        require(not 0xD800 <= code < 0xE000, "half a surrogate pair")
        if character in SHORT_ESCAPES:
            pieces.append(SHORT_ESCAPES[character])
        elif 0x20 <= code <= 0x7E:
            pieces.append(character)
        elif code < 0x10000:
            pieces.append(f"\\u{code:04x}")
        else:
            high, low = divmod(code - 0x10000, 0x400)
            pieces.append(f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}")
    return '"' + "".join(pieces) + '"'


def write_json(value: Any, level: int = 1) -> str:
    require(level <= 16, "nested too deep")
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) is int:
        require(-(2**53) < value < 2**53, "integer out of range")
        return str(value)
    if type(value) is str:
        return write_string(value)
    if type(value) is list:
        return "[" + ",".join(write_json(item, level + 1) for item in value) + "]"
    if type(value) is dict:
        names = sorted(value, key=lambda name: [ord(character) for character in name])
        return "{" + ",".join(f"{write_string(name)}:{write_json(value[name], level + 1)}" for name in names) + "}"
    raise RefusedError(f"{type(value).__name__} in JSON")


def read_json(data: bytes) -> Any:
    try:
        value = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise RefusedError("not JSON") from error
    require(write_json(value).encode("ascii") == data, "not canonical")
    return value


# "Every object has exactly the fields listed." A form is a check of one value; `fields` makes one of an object.

Form = Callable[[Any], bool]


def integer(low: int, high: int) -> Form:
    return lambda value: type(value) is int and low <= value <= high


def text(longest: int) -> Form:
    return lambda value: type(value) is str and len(value) <= longest


def one_of(*allowed: str) -> Form:
    return lambda value: type(value) is str and value in allowed


def digest(value: Any) -> bool:
    return type(value) is str and HEX32.fullmatch(value) is not None


def tag(value: Any) -> bool:
    return type(value) is str and HEX16.fullmatch(value) is not None


def array(form: Form, least: int, most: int) -> Form:
    return lambda value: type(value) is list and least <= len(value) <= most and all(map(form, value))


def fields(**forms: Form) -> Form:
    return lambda value: type(value) is dict and set(value) == set(forms) and all(forms[name](value[name]) for name in forms)


PRODUCER = fields(attention=text(256), chunk_tokens=integer(1, 1024), device=text(256), torch=text(256), transformers=text(256))

TENSOR = fields(
    dtype=one_of(*DTYPE_SIZE),
    name=one_of("k", "v", "i"),
    shape=lambda value: array(integer(1, 65_536), 2, 2)(value) and value[0] <= 4096,
)


def either(*forms: Form) -> Form:
    return lambda value: any(form(value) for form in forms)


def pair(value: Any) -> bool:
    return array(TENSOR, 2, 2)(value) and [tensor["name"] for tensor in value] == ["k", "v"]


def triple(value: Any) -> bool:
    """K, V, and indexer keys of one head."""
    return array(TENSOR, 3, 3)(value) and pair(value[:2]) and value[2]["name"] == "i" and value[2]["shape"][0] == 1


NOTHING = array(TENSOR, 0, 0)

STATE_NAMES = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7"]

STATE = fields(dtype=one_of(*DTYPE_SIZE), name=one_of(*STATE_NAMES), shape=array(integer(1, 65_536), 1, 4))


def states(value: Any) -> bool:
    """States in the order of their names, each once, and small enough."""
    if not array(STATE, 1, 16)(value):
        return False
    given = [state["name"] for state in value]
    sizes = [math.prod(state["shape"]) * DTYPE_SIZE[state["dtype"]] for state in value]
    return given == [name for name in STATE_NAMES if name in given] and max(sizes) < 2**32


def layer(**forms: Form) -> Form:
    """A layer, with or without states."""
    return either(fields(**forms), fields(**forms, state=states))


LAYER = either(
    layer(kind=one_of("kv"), tensors=pair),
    layer(kind=one_of("window"), tensors=pair, window=integer(2, 2**24)),
    layer(kind=one_of("indexed"), tensors=triple),
    layer(kind=one_of("none"), tensors=NOTHING),
)


def keeps_something(layers: Any) -> bool:
    return array(LAYER, 1, 1024)(layers) and any(layer["kind"] != "none" or "state" in layer for layer in layers)


LAYOUT = fields(layers=keeps_something, v=integer(1, 1))

PRECISION = one_of("native", "int8", "int4")

LOSSLESS = ("raw", "blosc2", "exponents")

GRIDS = ("int8", "int4")

TRANSFORMED = ("tc-high", "tc-medium", "tc-low", "tc-least")

REFINEMENTS = tuple(f"{precision}+" for precision in (*GRIDS, *TRANSFORMED))

CODECS_OF = {
    "native": LOSSLESS,
    **dict.fromkeys(GRIDS, (*LOSSLESS, "quant")),
    **dict.fromkeys(TRANSFORMED, (*LOSSLESS, "tc")),
    **dict.fromkeys(REFINEMENTS, (*LOSSLESS, "rest")),
}


def part(name: Form, least: int, most: int) -> Form:
    return fields(
        codec=one_of(*LOSSLESS, "quant", "tc", "rest"),
        dtype=one_of(*DTYPE_SIZE),
        length=integer(0, 2**32 - 1),
        name=name,
        shape=array(integer(1, 2**32 - 1), least, most),
    )


ROWS = part(one_of("k", "v", "i"), 3, 3)

STATE_PART = part(one_of(*STATE_NAMES), 1, 4)


def parts(rows: int) -> Form:
    """So many tensors by token, then any states."""
    return lambda value: (
        type(value) is list and array(ROWS, rows, rows)(value[:rows]) and array(STATE_PART, 0, 16)(value[rows:])
    )


def segment(kind: Form, parts: Form) -> Form:
    return fields(
        blake3=digest,
        kind=kind,
        layer=integer(0, 1023),
        length=integer(16, 2**32 - 1),
        offset=integer(0, 2**36),
        parts=parts,
        raw_digest=digest,
    )


SEGMENT = either(
    segment(one_of("kv", "window"), parts(2)),
    segment(one_of("indexed"), parts(3)),
    segment(one_of("none"), parts(0)),
)

CERTIFICATE = fields(
    continuation=integer(0, 2**20),
    greedy_equal=integer(0, 2**20),
    greedy_total=integer(0, 2**20),
    kl_mean=integer(0, 2**53 - 1),
    kl_p99=integer(0, 2**53 - 1),
    kl_recompute=integer(0, 2**53 - 1),
    perplexity=integer(0, 2**53 - 1),
    perplexity_exact=integer(0, 2**53 - 1),
    top1=integer(0, 1_000_000),
)


def in_any_precision(basis: dict[str, Form], coarse: dict[str, Form], **forms: Form) -> Form:
    """Lossy objects have a certificate, others have none (5.1); those of `tc` precisions have the fields `basis` too.

    Refinements have the fields `coarse`.
    """
    lossy = either(
        fields(**forms, precision=one_of(*GRIDS), certificate=CERTIFICATE),
        fields(**forms, **basis, precision=one_of(*TRANSFORMED), certificate=CERTIFICATE),
    )
    refined = fields(**forms, **coarse, precision=one_of(*REFINEMENTS))

    def certified(value: Any) -> bool:
        return lossy(value) and value["certificate"]["greedy_equal"] <= value["certificate"]["greedy_total"]

    return either(fields(**forms, precision=one_of("native")), refined, certified)


BLOCK = in_any_precision(
    {"basis": fields(bytes=integer(1, 2**30), digest=digest)},
    {"coarse": digest},
    type=one_of("block"),
    v=integer(1, 1),
    address=digest,
    model=tag,
    layout=digest,
    start=integer(0, 2**24),
    tokens=integer(1, 1024),
    salt=digest,
    commitment=digest,
    producer=PRODUCER,
    publisher=digest,
    segments=array(SEGMENT, 1, 1024),
)

ENTRY = fields(address=digest, etag=digest, size=integer(1, 2**36), tokens=integer(1, 1024))

MANIFEST = in_any_precision(
    {},
    {},
    type=one_of("manifest"),
    v=integer(1, 1),
    address=digest,
    model=tag,
    fingerprint=digest,
    model_name=text(256),
    layout=LAYOUT,
    block_tokens=integer(1, 1024),
    tokens=integer(1, 2**24),
    blocks=array(ENTRY, 1, 4096),
    created=integer(0, 2**40),
    expires=lambda value: value is None or integer(0, 2**40)(value),
    label=text(256),
    producer=PRODUCER,
    publisher=digest,
)


# Section 2: names.

ADAPTER_LEFT_OUT = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "peft_version",
    "revision",
    "task_type",
)

ADAPTER_SETS = ("exclude_modules", "modules_to_save", "target_modules")


def exact(value: Any) -> Any:
    """2.2: floats and large integers as strings."""
    if isinstance(value, float):
        return "f:" + {"nan": "nan", "inf": "inf", "-inf": "-inf"}.get(str(value), repr(value))
    if type(value) is int and abs(value) >= 2**53:
        return f"i:{value}"
    if isinstance(value, list):
        return [exact(item) for item in value]
    return {name: exact(item) for name, item in value.items()} if isinstance(value, dict) else value


def adapter_digest(config: dict[str, Any], weights: bytes) -> bytes:
    """2.1: of a LoRA adapter's configuration and its safetensors file."""
    kept = {name: value for name, value in config.items() if value is not None and name not in ADAPTER_LEFT_OUT}
    for name in ADAPTER_SETS:
        if isinstance(kept.get(name), list):
            kept[name] = sorted(kept[name], key=lambda text: [ord(character) for character in text])
    encoded = write_json(exact(kept)).encode()
    behind = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:behind])
    header.pop("__metadata__", None)
    lines = b""
    for name in sorted(header, key=lambda text: text.encode()):
        start, end = header[name]["data_offsets"]
        hashed = blake3(weights[behind + start : behind + end]).hexdigest()
        lines += write_json([name, header[name]["dtype"], header[name]["shape"], hashed]).encode() + b"\n"
    return derive("kvcdn v1 adapter", u32le(len(encoded)) + encoded + lines)


def adapted(base: bytes, applied: list[list[str]]) -> bytes:
    """2.1: the fingerprint of a model that applies adapters."""
    return derive("kvcdn v1 adapted fingerprint", base + write_json(applied).encode())


def model_tag(fingerprint: bytes) -> bytes:
    return derive("kvcdn v1 model tag", fingerprint)[:16]


def layout_digest(layout: Any) -> bytes:
    return derive("kvcdn v1 layout", write_json(layout).encode())


def bytes_per_token(layout: Any) -> int:
    return sum(
        tensor["shape"][0] * tensor["shape"][1] * DTYPE_SIZE[tensor["dtype"]]
        for layer in layout["layers"]
        for tensor in layer["tensors"]
    )


def block_tokens(per_token: int) -> int:
    length = 64
    while length < 1024 and 2 * length * per_token <= 16_777_216:
        length *= 2
    return length


@dataclass(frozen=True)
class Name:
    """One block of a prefix, as its reader knows it."""

    start: int
    tokens: int
    address: bytes
    content_key: bytes


def namespace_key(secret: bytes | None) -> bytes:
    return bytes(32) if secret is None else derive("kvcdn v1 namespace", secret)


def seed(fingerprint: bytes, layout: Any, namespace: bytes, precision: str = "native") -> bytes:
    return derive("kvcdn v1 seed", fingerprint + layout_digest(layout) + namespace + precision.encode("ascii"))


def names(
    fingerprint: bytes, layout: Any, namespace: bytes, token_ids: Sequence[int], precision: str = "native"
) -> tuple[list[Name], bytes]:
    """The names of all blocks, and the manifest's address."""
    length = block_tokens(bytes_per_token(layout))
    link = seed(fingerprint, layout, namespace, precision)
    found = []
    for start in range(0, len(token_ids), length):
        ids = token_ids[start : start + length]
        link = derive("kvcdn v1 chain", link + u32le(len(ids)) + b"".join(u32le(token) for token in ids))
        address = derive("kvcdn v1 block address", link)
        found.append(Name(start, len(ids), address, derive("kvcdn v1 content key", link)))
    return found, derive("kvcdn v1 manifest address", link)


# Section 3: the envelope.


@dataclass(frozen=True)
class Envelope:
    header: dict[str, Any]
    size: int
    etag: bytes


def read_envelope(data: bytes, magic: bytes, form: Form, trusted: set[str]) -> Envelope:
    require(len(data) >= 12 and data[:8] == magic, "magic")
    length = int.from_bytes(data[8:12], "little")
    require(2 <= length <= 1_048_576 and len(data) >= 76 + length, "header length")
    header = read_json(data[12 : 12 + length])
    require(form(header), "fields")
    require(header["publisher"] in trusted, "publisher")
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(header["publisher"]))
        key.verify(data[12 + length : 76 + length], b"kvcdn v1 signature\x00" + data[: 12 + length])
    except (InvalidSignature, ValueError) as error:
        raise RefusedError("signature") from error
    return Envelope(header, 76 + length, blake3(data[: 76 + length]).digest())


# Section 4: blocks.


def check_sizes(header: dict[str, Any]) -> int:
    """4.1: the segments follow each other without gaps. Returns the bytes behind the envelope."""
    passes = header["producer"]["chunk_tokens"]
    require(header["start"] % passes == 0 and header["tokens"] <= passes, "not one block")
    end = 0
    for index, segment in enumerate(header["segments"]):
        require(segment["layer"] == index, "layer")
        require(segment["offset"] == end, "offset")
        require(segment["length"] == 16 + sum(part["length"] for part in segment["parts"]), "segment length")
        for part in segment["parts"]:
            size = raw_size(part)
            require(part["codec"] in CODECS_OF[header["precision"]], "codec of the precision")
            require(size < 2**32 and part["length"] <= size + 64, "part length")
            require(part["name"] in STATE_NAMES or part["shape"][0] == header["tokens"], "tokens of a part")
        end += segment["length"]
    require(end <= 2**36, "object size")
    return end


def raw_size(part: dict[str, Any]) -> int:
    return math.prod(part["shape"]) * DTYPE_SIZE[part["dtype"]]


def decode_part(part: dict[str, Any], encoded: bytes) -> bytes:
    """4.3."""
    size, element = raw_size(part), DTYPE_SIZE[part["dtype"]]
    if part["codec"] == "raw":
        require(len(encoded) == size, "raw size")
        return encoded
    if part["codec"] == "rest":
        return decode_rest(part, encoded)
    if part["codec"] == "quant":
        return decode_grid(part, encoded)
    if part["codec"] == "tc":
        return decode_components(part, encoded)
    if part["codec"] == "exponents":
        return decode_exponents(part, encoded)
    return decode_chunk(encoded, size, element, [0] * 5 + [1])


def decode_exponents(part: dict[str, Any], encoded: bytes) -> bytes:
    """4.3, a number at a time."""
    require(part["dtype"] == "bfloat16" and len(encoded) >= 4, "exponents")
    count, width = part["shape"][0], math.prod(part["shape"][1:])
    total, (strays,) = count * width, struct.unpack_from("<I", encoded)
    starts = list(accumulate([4, 4 * strays, strays, width, total]))
    require(strays <= total and starts[-1] <= len(encoded), "sizes of exponents")
    places = struct.unpack_from(f"<{strays}I", encoded, 4)
    require(all(before < after for before, after in pairwise((*places, total))), "places")
    own, bases, kept = (encoded[begin:end] for begin, end in pairwise(starts[1:]))
    require(max(bases) <= 240, "bases")
    pairs = decode_chunk(encoded[starts[-1] :], (count + 1) // 2 * width, 1, [0] * 6)
    exceptions, raw = dict(zip(places, own, strict=True)), bytearray()
    for place in range(total):
        row, column = divmod(place, width)
        code = pairs[row // 2 * width + column] // (16 if row % 2 else 1) % 16
        exponent = exceptions.get(place, code + bases[column])
        raw += struct.pack("<H", kept[place] // 128 * 32768 + exponent * 128 + kept[place] % 128)
    return bytes(raw)


def decode_chunk(encoded: bytes, size: int, element: int, filters: list[int]) -> bytes:
    require(len(encoded) >= 32, "chunk header")
    nbytes, blocksize, cbytes = struct.unpack_from("<III", encoded, 4)
    require(nbytes == size and cbytes == len(encoded) and encoded[3] == element, "chunk sizes")
    require(1 <= blocksize <= nbytes, "chunk blocks")
    flags = encoded[2]
    require(flags & 1 and flags & 4 and not flags & 8 and flags >> 5 == 4, "chunk flags")
    require(sorted(encoded[16:22]) == filters and encoded[24:30] == bytes(6), "chunk filters")
    require(encoded[31] in (0x00, 0x10), "chunk special values")
    try:
        raw = blosc2.decompress2(encoded)
    except (RuntimeError, ValueError) as error:
        raise RefusedError("chunk") from error
    require(len(raw) == size, "decoded size")
    return bytes(raw)


def bfloat16_numbers(patterns: Any) -> Any:
    return (patterns.astype("<u4") * 65536).astype("<u4").view("<f4")


def rounded(values: Any, dtype: str) -> bytes:
    """4.4: float32 numbers in a tensor's dtype."""
    if dtype == "bfloat16":
        return bytes(((values.view("<u4").astype("<u8") + 0x8000) // 65536 % 65536).astype("<u2").tobytes())
    with np.errstate(over="ignore"):
        return bytes(values.astype("<f2" if dtype == "float16" else "<f4").tobytes())


def decode_grid(part: dict[str, Any], encoded: bytes) -> bytes:
    """4.4, a number at a time where that is clearer than fast."""
    tokens, heads, dim = part["shape"]
    require(len(encoded) >= 8, "header of the grid")
    bits, centred, lead, trail, per_tokens, per_values = struct.unpack("<BBBBHH", encoded[:8])
    require(bits in (4, 8) and centred in (0, 1) and per_tokens >= 1, "grid")
    require(1 <= per_values <= dim and dim % per_values == 0 and lead + trail <= tokens, "groups")
    row = heads * dim * DTYPE_SIZE[part["dtype"]]
    middle = tokens - lead - trail
    groups = (-(-middle // per_tokens), heads, dim // per_values)
    count, wanted = groups[0] * groups[1] * groups[2], middle * heads * dim
    starts = [8, lead * row, trail * row, (2 - centred) * count * 2, wanted if bits == 8 else (wanted + 1) // 2]
    ends = list(accumulate(starts))
    require(len(encoded) == ends[-1], "sizes of the grid")
    first, last, parameters, stored = (encoded[begin:end] for begin, end in pairwise(ends))
    patterns = np.frombuffer(parameters, "<u2")
    if bits == 4:
        stored = bytes([byte % 16 for byte in stored] + [byte // 16 for byte in stored])[:wanted]
    codes = np.frombuffer(stored, "u1").reshape(middle, heads, dim)
    require((not ((patterns & 0x7F80) == 0x7F80).any() and not (patterns[-count:] & 0x8000).any()) or not count, "parameters")
    numbers = bfloat16_numbers(patterns)
    steps = numbers[len(numbers) - count :].reshape(groups)
    offsets = (np.float32(-(2 ** (bits - 1))) * steps if centred else numbers[:count]).reshape(groups)
    values = np.empty((middle, heads, dim), "<f4")
    for token in range(middle):
        for value in range(dim):
            place = (token // per_tokens, slice(None), value // per_values)
            values[token, :, value] = codes[token, :, value].astype("<f4") * steps[place] + offsets[place]
    return first + rounded(values, part["dtype"]) + last


@dataclass(frozen=True)
class TensorBasis:
    """4.6: what a basis says of one tensor."""

    mean: Any
    scales: Any
    matrices: Any
    frequencies: Any
    interleaved: bool


def read_basis(body: bytes, layout: Any) -> list[list[TensorBasis]]:
    """4.6, by layer and tensor."""
    length = int.from_bytes(body[:4], "little")
    require(length <= 2**20 and len(body) >= 4 + length, "description of a basis")
    description, place = read_json(body[4 : 4 + length]), 4 + length
    rope = fields(interleaved=lambda value: type(value) is bool, pairs=integer(1, 32_768))
    entry = fields(groups=integer(1, 4096), rope=lambda value: value is None or integer(0, 63)(value))
    form = fields(layout=digest, ropes=array(rope, 0, 64), tensors=array(entry, 1, 3072), v=integer(1, 1))
    require(form(description) and description["layout"] == layout_digest(layout).hex(), "description of a basis")

    def take(dtype: str, count: int) -> Any:
        nonlocal place
        size = np.dtype(dtype).itemsize * count
        require(place + size <= len(body), "length of a basis")
        place += size
        values = np.frombuffer(body[place - size : place], dtype)
        require(dtype == "i1" or np.isfinite(values).all(), "numbers of a basis")
        return values

    frequencies = [take("<f8", one["pairs"]) for one in description["ropes"]]
    specs = [tensor["shape"] for layer in layout["layers"] for tensor in layer["tensors"]]
    require(len(specs) == len(description["tensors"]), "tensors of a basis")
    found = []
    for (heads, dim), one in zip(specs, description["tensors"], strict=True):
        groups, index = one["groups"], one["rope"]
        width = heads * dim // groups
        require(heads % groups == 0 and width <= 1024 and (index is None or index < len(frequencies)), "groups of a basis")
        require(index is None or 2 * len(frequencies[index]) <= dim, "rope of a basis")
        mean, scales = take("<f4", heads * dim).reshape(heads, dim), take("<f4", groups)
        matrices = take("i1", groups * width * width).reshape(groups, width, width)
        require((matrices != -128).all(), "matrices of a basis")
        turns = (None, False) if index is None else (frequencies[index], description["ropes"][index]["interleaved"])
        found.append(TensorBasis(mean, scales, matrices, *turns))
    require(place == len(body), "end of a basis")
    remaining = iter(found)
    return [[next(remaining) for _ in layer["tensors"]] for layer in layout["layers"]]


def read_symbols(stream: bytes, count: int) -> Any:
    """4.5: a stream of 16-bit integers."""
    if count == 0:
        require(stream == b"", "stream of nothing")
        return np.empty(0, np.int16)
    require(stream[:3] == b"\x04\x01\x00", "kind of a stream")
    values = np.empty(count, np.int16)
    try:
        reader, start = FileDecompressor.new(stream)
        chunk, described = reader.chunk_decompressor(stream[start:], "i16")
        progress, read = chunk.read_page_into(stream[start + described :], count, values)
    except (RuntimeError, TypeError) as error:
        raise RefusedError("stream") from error
    require(progress.n_processed == count and start + described + read == len(stream), "length of a stream")
    return values


def decode_components(part: dict[str, Any], encoded: bytes) -> bytes:
    """4.5, with integers of 64 bits where the publisher may have used others."""
    tokens, heads, dim = part["shape"]
    basis = part["basis"]
    require(len(encoded) >= 8, "header of components")
    lead, classes, step = struct.unpack("<HHf", encoded[:8])
    row = heads * dim * DTYPE_SIZE[part["dtype"]]
    start = 8 + lead * row
    require(lead <= tokens and classes <= 16 and len(encoded) >= start + 4 * (classes + 2), "sizes of components")
    require(0 < step < float("inf"), "step")
    lengths = struct.unpack_from(f"<{classes + 2}I", encoded, start)
    place = start + 4 * (classes + 2)
    require(place + sum(lengths) == len(encoded), "streams")
    streams = []
    for length in lengths:
        streams.append(encoded[place : place + length])
        place += length
    middle = tokens - lead
    exponents, levels = read_symbols(streams[0], middle), read_symbols(streams[1], heads * dim)
    require(all(-8 <= value <= 8 for value in exponents) and all(-64 <= value <= 63 for value in levels), "ranges")
    symbols = place_symbols(streams[2:], exponents.tolist(), levels.tolist())
    groups, width, _ = basis.matrices.shape
    sums = np.einsum("tgc,gcj->tgj", symbols.reshape(middle, groups, width), basis.matrices.astype(np.int64))
    factors = np.float32(step) * np.exp2(exponents.astype(np.float32))
    values = sums.astype(np.float32) * (factors[:, None] * basis.scales[None, :])[:, :, None]
    values = (values.reshape(middle, heads, dim) + basis.mean).astype(np.float32)
    if basis.frequencies is not None:
        turn(values, basis, part["start"] + lead)
    return encoded[8:start] + rounded(values, part["dtype"])


def decode_rest(part: dict[str, Any], encoded: bytes) -> bytes:
    """4.7, a number at a time."""
    require(part["dtype"] in ("bfloat16", "float16") and part.get("coarse") is not None, "nothing to refine")
    coarse = struct.unpack(f"<{len(part['coarse']) // 2}H", part["coarse"])
    require(len(encoded) >= 48, "lengths of the rest")
    ends = list(accumulate(struct.unpack("<12I", encoded[:48]), initial=48))
    require(ends[-1] == len(encoded), "streams of the rest")
    exponents = [value % 2**15 // (2**7 if part["dtype"] == "bfloat16" else 2**10) for value in coarse]
    largest = max(exponents)
    classes = [min(largest - exponent, 11) for exponent in exponents]
    left = [
        iter(read_symbols(encoded[start:end], classes.count(kind)).tolist()) for kind, (start, end) in enumerate(pairwise(ends))
    ]
    exact = []
    for value, kind in zip(coarse, classes, strict=True):
        order = (0xFFFF - value if value >= 0x8000 else value + 0x8000) + next(left[kind])
        exact.append(0xFFFF - order % 0x10000 if order % 0x10000 < 0x8000 else order % 0x10000 - 0x8000)
    return struct.pack(f"<{len(exact)}H", *exact)


def place_symbols(streams: list[bytes], exponents: list[int], levels: list[int]) -> Any:
    """4.5: which symbol is where, one at a time."""
    symbols = np.zeros((len(exponents), len(levels)), np.int64)
    kinds = sorted({level - exponent for level in set(levels) for exponent in set(exponents)})
    kinds = [kind for kind in kinds if kind >= -2]
    require(len(kinds) == len(streams), "classes")
    for kind, stream in zip(kinds, streams, strict=True):
        where = []
        for exponent in sorted(set(exponents)):
            columns = [index for index, level in enumerate(levels) if level - exponent == kind]
            where += [(token, column) for token, own in enumerate(exponents) if own == exponent for column in columns]
        for (token, column), symbol in zip(where, read_symbols(stream, len(where)).tolist(), strict=True):
            symbols[token, column] = symbol
    return symbols


def turn(values: Any, basis: TensorBasis, start: int) -> None:
    """4.5: rotary embedding."""
    count = len(basis.frequencies)
    for token in range(len(values)):
        angles = (start + token) * basis.frequencies
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        for pair in range(count):
            left, right = (2 * pair, 2 * pair + 1) if basis.interleaved else (pair, pair + count)
            a, b = values[token, :, left].copy(), values[token, :, right].copy()
            values[token, :, left] = a * cosine[pair] - b * sine[pair]
            values[token, :, right] = b * cosine[pair] + a * sine[pair]


def read_segment(
    header: dict[str, Any],
    name: Name,
    index: int,
    stored: bytes,
    bases: Sequence[TensorBasis | None] = (None,) * 3,
    coarse: Sequence[bytes] = (),
) -> list[bytes]:
    """4.2: the raw tensors of one layer, from its stored bytes."""
    segment = header["segments"][index]
    require(blake3(stored).hexdigest() == segment["blake3"], "hash")
    material = name.content_key + bytes.fromhex(header["salt"])
    require(derive("kvcdn v1 commitment", material).hex() == header["commitment"], "commitment")
    descriptor = write_json({key: segment[key] for key in ("kind", "layer", "length", "parts")}).encode()
    cipher = AESGCM(derive("kvcdn v1 object key", material))
    try:
        encoded = cipher.decrypt(u32le(index) + bytes(8), stored, b"kvcdn v1 segment\x00" + name.address + descriptor)
    except InvalidTag as error:
        raise RefusedError("AEAD") from error
    raw = []
    for part, basis, near in zip(segment["parts"], (*bases, *[None] * 16), (*coarse, *[None] * 19), strict=False):
        piece, encoded = encoded[: part["length"]], encoded[part["length"] :]
        raw.append(decode_part({**part, "basis": basis, "coarse": near, "start": header["start"]}, piece))
    keyed = blake3(b"".join(raw), key=derive("kvcdn v1 raw digest", material)).hexdigest()
    require(keyed == segment["raw_digest"], "raw digest")
    return raw


@dataclass(frozen=True)
class Question:
    """What a reader asks a block for: the model and the name."""

    fingerprint: bytes
    layout: Any
    name: Name
    trusted: set[str]
    precision: str = "native"
    basis: bytes = b""
    coarse: bytes = b""
    """4.7: the block that is refined."""
    coarse_name: Name | None = None


def asked_parts(layer: dict[str, Any], tokens: int, *, checkpoint: bool) -> list[Any]:
    """What a segment must hold: 2.3 for tensors by token, and states where the block ends at a checkpoint."""
    rows = [(tensor["name"], tensor["dtype"], [tokens, *tensor["shape"]]) for tensor in layer["tensors"]]
    kept = layer.get("state", []) if checkpoint else []
    return rows + [(state["name"], state["dtype"], state["shape"]) for state in kept]


def read_block(data: bytes, question: Question) -> tuple[dict[str, Any], list[list[bytes]]]:
    """The header, and the raw tensors by layer."""
    name, layout = question.name, question.layout
    envelope = read_envelope(data, b"KVCDNB1\n", BLOCK, question.trusted)
    header = envelope.header
    behind = check_sizes(header)
    require(len(data) == envelope.size + behind, "object size")
    require(header["address"] == name.address.hex(), "address")
    require(header["model"] == model_tag(question.fingerprint).hex(), "model")
    require(header["layout"] == layout_digest(layout).hex(), "layout")
    require(header["precision"] == question.precision, "precision")
    require((header["start"], header["tokens"]) == (name.start, name.tokens), "position")
    require(header["producer"]["chunk_tokens"] == block_tokens(bytes_per_token(layout)), "schedule")
    found = [
        (segment["kind"], [(part["name"], part["dtype"], part["shape"]) for part in segment["parts"]])
        for segment in header["segments"]
    ]
    length = block_tokens(bytes_per_token(layout))
    checkpoint = name.tokens < length or (name.start // length + 1) % 16 == 0
    asked = [(layer["kind"], asked_parts(layer, name.tokens, checkpoint=checkpoint)) for layer in layout["layers"]]
    require(found == asked, "tensors")
    layers = []
    bases: list[Any] = [(None,) * 3] * len(layout["layers"])
    if "basis" in header:
        named = {"bytes": len(question.basis), "digest": blake3(question.basis).hexdigest()}
        require(header["basis"] == named, "name of the basis")
        bases = list(read_basis(question.basis, layout))
    near: list[list[bytes]] = [[] for _ in layout["layers"]]
    if "coarse" in header and question.coarse_name is not None:
        precision = question.precision.removesuffix("+")
        asked_for = replace(question, name=question.coarse_name, precision=precision, coarse=b"", coarse_name=None)
        _, near = read_block(question.coarse, asked_for)
        length = 76 + int.from_bytes(question.coarse[8:12], "little")
        require(header["coarse"] == blake3(question.coarse[:length]).hexdigest(), "the block that is refined")
    for index, segment in enumerate(header["segments"]):
        start = envelope.size + segment["offset"]
        stored = data[start : start + segment["length"]]
        layers.append(read_segment(header, name, index, stored, bases[index], near[index]))
    return header, layers


# Section 5: manifests.


def read_manifest(data: bytes, trusted: set[str]) -> dict[str, Any]:
    envelope = read_envelope(data, b"KVCDNM1\n", MANIFEST, trusted)
    require(len(data) == envelope.size, "trailing bytes")
    header = envelope.header
    require(header["model"] == model_tag(bytes.fromhex(header["fingerprint"])).hex(), "tag")
    length = block_tokens(bytes_per_token(header["layout"]))
    require(header["block_tokens"] == length and header["producer"]["chunk_tokens"] == length, "block length")
    counts = [block["tokens"] for block in header["blocks"]]
    require(sum(counts) == header["tokens"], "sum of tokens")
    require(all(count == length for count in counts[:-1]) and counts[-1] <= length, "tokens of blocks")
    if any("state" in layer for layer in header["layout"]["layers"]):
        require(counts[-1] < length or len(counts) % 16 == 0, "no checkpoint")
    return header


# The tests.


def vectors(name: str) -> Any:
    return json.loads((VECTORS / name).read_text("utf-8"))


def cases(name: str, field: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in vectors(name)[field]]


def test_imports_nothing_from_the_package() -> None:
    """The reader would prove nothing if it shared code with what it checks; support and attacks are only asked for files."""
    tree = ast.parse(Path(__file__).read_text("utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert set() == {module for module in imported if module.split(".")[0] == "kvcdn"}


@pytest.mark.parametrize("case", cases("derivations.json", "derive"))
def test_derive(case: Any) -> None:
    """Every context of FORMAT.md gives the recorded bytes, and the BLAKE3 library the bytes of BLAKE3's own vectors."""
    assert case["output"] == derive(case["context"], bytes.fromhex(case["material"])).hex()


@pytest.mark.parametrize("case", cases("derivations.json", "adapters"))
def test_adapter(case: Any) -> None:
    """An adapter's digest from its two files, and the fingerprint of a model that applies it."""
    digest = adapter_digest(json.loads(case["config"]), bytes.fromhex(case["weights"]))
    assert case["digest"] == digest.hex()
    assert digest.hex() in [entry[0] for entry in case["applied"]]
    assert case["fingerprint"] == adapted(bytes.fromhex(case["base"]), case["applied"]).hex()


def test_contexts_are_those_of_the_document() -> None:
    """The vectors use every context string that FORMAT.md names for `derive`, and no other."""
    document = " ".join((Path(__file__).parents[1] / "FORMAT.md").read_text("utf-8").split())
    named = set(re.findall(r'derive\("([^"]+)"', document))
    used = {case["context"] for case in vectors("derivations.json")["derive"]}
    assert named == {context for context in used if not context.startswith("BLAKE3")}


@pytest.mark.parametrize("case", cases("layouts.json", "layouts"))
def test_layout(case: Any) -> None:
    """Digest, bytes per token and block length follow from the layout."""
    layout = {"layers": [layer for times, layer in case["runs"] for _ in range(times)], "v": 1}
    assert LAYOUT(layout)
    assert case["bytes_per_token"] == bytes_per_token(layout)
    assert case["block_tokens"] == block_tokens(bytes_per_token(layout))
    assert case["digest"] == layout_digest(layout).hex()


@pytest.mark.parametrize(("per_token", "length"), vectors("layouts.json")["block_tokens"])
def test_block_length(per_token: int, length: int) -> None:
    """The block length at and next to every power of two."""
    assert length == block_tokens(per_token)


@pytest.mark.parametrize("case", cases("names.json", "prefixes"))
def test_names(case: Any) -> None:
    """The chain, recomputed from token ids, gives every address, content key and the manifest's address."""
    fingerprint = bytes.fromhex(case["fingerprint"])
    secret = case["namespace_secret"]
    namespace = namespace_key(None if secret is None else bytes.fromhex(secret))
    found, manifest = names(fingerprint, case["layout"], namespace, case["token_ids"])
    assert case["seed"] == seed(fingerprint, case["layout"], namespace).hex()
    assert case["model_tag"] == model_tag(fingerprint).hex()
    assert case["manifest_address"] == manifest.hex()
    blocks = [
        {"start": name.start, "tokens": name.tokens, "address": name.address.hex(), "content_key": name.content_key.hex()}
        for name in found
    ]
    assert case["blocks"] == blocks


@pytest.mark.parametrize("case", cases("canonical.json", "accepted"))
def test_canonical_accepted(case: Any) -> None:
    """Canonical bytes are read, and written again as they were."""
    data = bytes.fromhex(case["hex"])
    assert data == write_json(read_json(data)).encode()


@pytest.mark.parametrize("case", cases("canonical.json", "refused"))
def test_canonical_refused(case: Any) -> None:
    """Everything else is refused."""
    with pytest.raises(RefusedError):
        read_json(bytes.fromhex(case["hex"]))


def questions(case: Any) -> tuple[dict[str, Any], list[Question]]:
    """A golden document's manifest, and what to ask each of its blocks for, from its token ids."""
    trusted = {case["publisher"]}
    manifest = read_manifest(base64.b64decode(case["manifest"]), trusted)
    fingerprint = bytes.fromhex(case["fingerprint"])
    token_ids = [case["token_step"] * index % case["token_modulus"] for index in range(case["tokens"])]
    found, address = names(fingerprint, manifest["layout"], namespace_key(None), token_ids)
    require(address.hex() == manifest["address"], "manifest address")
    return manifest, [Question(fingerprint, manifest["layout"], name, trusted) for name in found]


@pytest.mark.parametrize("case", cases("objects.json", "documents"))
def test_golden_document(case: Any) -> None:
    """The recorded manifest and blocks open from the token ids alone and hold the recorded tensors."""
    manifest, asked = questions(case)
    assert case["manifest_fields"] == {name: manifest[name] for name in case["manifest_fields"]}
    codecs = set()
    for question, entry, block in zip(asked, manifest["blocks"], case["blocks"], strict=True):
        data = base64.b64decode(block["object"])
        header, layers = read_block(data, question)
        assert block["fields"] == {field: header[field] for field in block["fields"]}
        assert block["tensor_blake3"] == [[blake3(raw).hexdigest() for raw in layer] for layer in layers]
        listed = (entry["address"], entry["size"], entry["tokens"])
        assert listed == (question.name.address.hex(), len(data), question.name.tokens)
        assert entry["etag"] == read_envelope(data, b"KVCDNB1\n", BLOCK, question.trusted).etag.hex()
        codecs |= {part["codec"] for segment in header["segments"] for part in segment["parts"]}
    assert case["codecs"] == sorted(codecs)


def test_golden_tensor_is_readable_numbers() -> None:
    """A golden value tensor holds the float32 numbers it was made of, in FORMAT.md's row-major, little-endian order."""
    case = vectors("objects.json")["documents"][0]
    manifest, asked = questions(case)
    start, tokens = asked[-1].name.start, asked[-1].name.tokens
    _, layers = read_block(base64.b64decode(case["blocks"][-1]["object"]), asked[-1])
    shape = (tokens, *manifest["layout"]["layers"][0]["tensors"][1]["shape"])
    values = np.frombuffer(layers[0][1], dtype="<f4").reshape(shape)
    expected = np.fromfunction(lambda token, head, place: start + token + head / 4 + place / 64, shape)
    assert expected.tolist() == values.tolist()


@pytest.mark.parametrize("case", cases("refused.json", "objects"))
def test_golden_refusals(case: Any) -> None:
    """Each recorded hostile object is refused."""
    golden = vectors("objects.json")["documents"][0]
    data = base64.b64decode(case["object"])
    _, asked = questions(golden)
    with pytest.raises(RefusedError):
        read_manifest(data, asked[-1].trusted) if case["kind"] == "manifest" else read_block(data, asked[-1])


def test_reads_what_the_package_writes() -> None:
    """A document published a moment ago opens, block for block, to the tensors that went in."""
    from support.blocks import make_document

    document = make_document(tokens=1100, layers=3, heads=2, dim=16, dtype="float32", seed=7)
    trusted = {document.key.public.hex()}
    manifest = read_manifest(document.manifest_bytes, trusted)
    fingerprint = bytes.fromhex(manifest["fingerprint"])
    found, address = names(fingerprint, manifest["layout"], namespace_key(None), document.token_ids)
    assert f"v1/{model_tag(fingerprint).hex()}/manifests/{address.hex()}" == document.manifest_key
    for name in found:
        text_form = name.address.hex()
        key = f"v1/{model_tag(fingerprint).hex()}/blocks/{text_form[:2]}/{text_form}"
        _, layers = read_block(document.blocks[key], Question(fingerprint, manifest["layout"], name, trusted))
        assert document.raw[key] == layers


@pytest.mark.parametrize("case", cases("codecs.json", "parts"))
def test_golden_parts(case: Any) -> None:
    """Each recorded part of a codec that knows numbers decodes to the recorded bits."""
    part = {"codec": case["codec"], "dtype": case["dtype"], "shape": case["shape"]}
    if "basis" in case:
        layer, tensor = case["tensor"]
        basis = read_basis(base64.b64decode(case["basis"]), case["layout"])[layer][tensor]
        part |= {"start": case["start"], "basis": basis}
    if "coarse" in case:
        part["coarse"] = base64.b64decode(case["coarse"])
    assert case["decoded_blake3"] == blake3(decode_part(part, base64.b64decode(case["encoded"]))).hexdigest()


@pytest.mark.parametrize("precision", [*GRIDS, *TRANSFORMED])
def test_reads_lossy_documents(precision: str) -> None:
    """A document published in a lossy precision decodes to what its publisher decoded: the raw digests hold that."""
    from support.blocks import make_basis, make_lossy_document

    document = make_lossy_document(precision)
    trusted = {document.key.public.hex()}
    manifest = read_manifest(document.manifest_bytes, trusted)
    assert CERTIFICATE(manifest["certificate"])
    fingerprint = bytes.fromhex(manifest["fingerprint"])
    found, _ = names(fingerprint, manifest["layout"], namespace_key(None), document.token_ids, precision)
    codecs = set()
    for name, data in zip(found, document.blocks.values(), strict=True):
        basis = make_basis(document.model.layout).body
        header, _ = read_block(data, Question(fingerprint, manifest["layout"], name, trusted, precision, basis))
        codecs |= {part["codec"] for segment in header["segments"] for part in segment["parts"]}
    assert ("quant" if precision in GRIDS else "tc") in codecs


@pytest.mark.parametrize("precision", ["int4", "tc-low"])
def test_reads_refinements(precision: str) -> None:
    """With their coarse blocks they decode to the exact KV, with other ones to nothing."""
    from support.blocks import make_basis, make_lossy_document, make_refinement

    coarse = make_lossy_document(precision)
    document = make_refinement(coarse)
    trusted = {document.key.public.hex(), coarse.key.public.hex()}
    manifest = read_manifest(document.manifest_bytes, trusted)
    fingerprint, layout = bytes.fromhex(manifest["fingerprint"]), manifest["layout"]
    found, _ = names(fingerprint, layout, namespace_key(None), document.token_ids, f"{precision}+")
    below, _ = names(fingerprint, layout, namespace_key(None), document.token_ids, precision)
    basis = make_basis(document.model.layout).body
    codecs = set()
    pairs = zip(found, below, document.blocks.items(), coarse.blocks.values(), strict=True)
    for name, coarse_name, (key, data), near in pairs:
        question = Question(fingerprint, layout, name, trusted, f"{precision}+", basis, near, coarse_name)
        header, layers = read_block(data, question)
        assert document.raw[key] == layers
        codecs |= {part["codec"] for segment in header["segments"] for part in segment["parts"]}
        with pytest.raises(RefusedError):
            read_block(data, replace(question, coarse=near[:-1]))
        other = replace(question, coarse_name=replace(coarse_name, start=coarse_name.start + 1))
        with pytest.raises(RefusedError):
            read_block(data, other)
    assert "rest" in codecs


def test_refuses_hostile_payloads() -> None:
    """What the package's decoders refuse, this reader refuses as well."""
    from attacks.payloads import BASIS, COMPONENT_ROWS, LAYOUT, payloads

    accepted = []
    basis = read_basis(BASIS.body, LAYOUT.to_json())[0][0]
    rows = {"dtype": COMPONENT_ROWS.dtype, "shape": list(COMPONENT_ROWS.shape), "start": COMPONENT_ROWS.start, "basis": basis}
    rows["coarse"] = COMPONENT_ROWS.coarse
    for payload in payloads():
        try:
            decode_part({"codec": payload.codec, **rows}, payload.data)
        except RefusedError:
            continue
        accepted.append(payload.name)
    assert accepted == []


def test_refuses_what_the_package_refuses() -> None:
    """Two readers that know nothing of each other agree about every hostile block and manifest."""
    from attacks.collection import block_attacks, manifest_attacks
    from attacks.forge import MODEL, PUBLISHER, TOKEN_IDS, sound_blocks, sound_manifest

    trusted = {PUBLISHER.public.hex()}
    layout = json.loads(json.dumps(MODEL.layout.to_json()))
    found, _ = names(MODEL.fingerprint, layout, namespace_key(None), TOKEN_IDS)
    question = Question(MODEL.fingerprint, layout, found[-1], trusted)
    read_block(sound_blocks()[-1], question)
    read_manifest(sound_manifest(), trusted)
    accepted = []
    for attack in block_attacks():
        try:
            read_block(attack.data, question)
        except RefusedError:
            continue
        accepted.append(attack.name)
    for attack in manifest_attacks():
        try:
            read_manifest(attack.data, trusted)
        except RefusedError:
            continue
        accepted.append(attack.name)
    assert accepted == []
