"""Attacks on the envelope: lengths, magic, encoding of the header, signature (FORMAT.md sections 1 and 3)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from attacks.attack import Attack, Reader
from attacks.forge import MALLORY, PREAMBLE_BYTES, PUBLISHER, envelope, split_envelope

from kvcdn import canonical
from kvcdn.signing import SIGNATURE_BYTES, SigningKey

ED25519_ORDER = 2**252 + 27742317777372353535851937790883648493
"""L of RFC 8032: a signature's S plus L verifies too, unless the verifier checks the range."""

SMALL_ORDER_POINT = (1).to_bytes(32, "little")
"""The neutral element as a public key: a careless verifier accepts R = this, S = 0 for any message."""


def envelope_attacks(sound: bytes, other_magic: bytes) -> Iterator[Attack]:
    """Attacks on the envelope of `sound`, a block or a manifest; `other_magic` is the other kind's."""
    yield from _lengths(sound)
    yield from _magics(sound, other_magic)
    yield from _encodings(sound)
    yield from _signatures(sound)


def _lengths(sound: bytes) -> Iterator[Attack]:
    _, size = split_envelope(sound)
    for end in (0, 1, 7, 8, PREAMBLE_BYTES - 1):
        yield Attack(f"truncated-at-{end}", sound[:end], "truncated")
    header_end = size - SIGNATURE_BYTES
    for name, end in (("preamble", 12), ("header-1", header_end - 1), ("header", header_end), ("signature-1", size - 1)):
        yield Attack(f"truncated-at-{name}", sound[:end], "truncated")
    length = header_end - PREAMBLE_BYTES
    for lie in (0, 1, (1 << 20) + 1, 1 << 31, (1 << 32) - 1):
        yield Attack(f"header-length-{lie}", sound[:8] + struct.pack("<I", lie) + sound[12:], "header length")
    header = sound[PREAMBLE_BYTES:header_end]
    for change in (-1, 1):
        data = envelope(sound[:8], header, PUBLISHER, length=length + change) + sound[size:] + bytes(1)
        yield Attack(f"header-length-off-by-{change}", data, "canonical JSON")
    yield Attack("header-length-1MiB-of-nothing", sound[:8] + struct.pack("<I", 1 << 20) + sound[12:200], "truncated")


def _magics(sound: bytes, other_magic: bytes) -> Iterator[Attack]:
    _, size = split_envelope(sound)
    header = sound[PREAMBLE_BYTES : size - SIGNATURE_BYTES]
    magics = {
        "other-kind": other_magic,
        "lowercase": sound[:8].lower(),
        "carriage-return": sound[:7] + b"\r",
        "next-version": sound[:6] + b"2\n",
        "zeros": bytes(8),
    }
    for name, magic in magics.items():
        yield Attack(f"magic-{name}", envelope(magic, header, PUBLISHER) + sound[size:], "magic")


def _encodings(sound: bytes) -> Iterator[Attack]:
    fields, size = split_envelope(sound)
    header = sound[PREAMBLE_BYTES : size - SIGNATURE_BYTES]
    address = f'"address":"{fields["address"]}",'.encode()
    deep = b'{"address":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    forms = {
        "white-space": header.replace(b",", b", ", 1),
        "leading-space": b" " + header,
        "trailing-newline": header + b"\n",
        "trailing-nul": header + b"\x00",
        "trailing-object": header + b"{}",
        "byte-order-mark": b"\xef\xbb\xbf" + header,
        "utf-16": header.decode().encode("utf-16"),
        "key-order": b"{" + header[len(address) + 1 : -1] + b"," + address[:-1] + b"}",
        "duplicate-key": header.replace(address, address + address),
        "duplicate-key-other-value": header.replace(address, b'"address":"' + b"0" * 64 + b'",' + address),
        "float": header.replace(b'"v":1}', b'"v":1.0}'),
        "exponent": header.replace(b'"v":1}', b'"v":1e0}'),
        "nan": header.replace(b'"v":1}', b'"v":NaN}'),
        "infinity": header.replace(b'"v":1}', b'"v":-Infinity}'),
        "leading-zero": header.replace(b'"v":1}', b'"v":01}'),
        "plus-sign": header.replace(b'"v":1}', b'"v":+1}'),
        "minus-zero": header.replace(b'"v":1}', b'"v":-0}'),
        "integer-2^53": header.replace(b'"v":1}', b'"v":9007199254740992}'),
        "integer-of-400-digits": header.replace(b'"v":1}', b'"v":' + b"9" * 400 + b"}"),
        "integer-of-500000-digits": header.replace(b'"v":1}', b'"v":' + b"9" * 500_000 + b"}"),
        "hexadecimal": header.replace(b'"v":1}', b'"v":0x1}'),
        "raw-utf-8": header.replace(b'"type":"', b'"type":"\xc3\xa9'),
        "broken-utf-8": header.replace(b'"type":"', b'"type":"\xff'),
        "needless-escape": header.replace(b'"v":1}', b'"\\u0076":1}'),
        "uppercase-escape": header.replace(b'"type":"', b'"type":"\\u00E9'),
        "escaped-slash": header.replace(b'"type":"', b'"type":"\\/'),
        "half-a-surrogate-pair": header.replace(b'"type":"', b'"type":"\\ud800'),
        "control-character": header.replace(b'"type":"', b'"type":"\x01'),
        "single-quotes": header.replace(b'"', b"'"),
        "comment": header.replace(b"{", b"{/**/", 1),
        "trailing-comma": header[:-1] + b",}",
        "nested-17": header.replace(b'"v":1}', b'"v":' + b"[" * 16 + b"1" + b"]" * 16 + b"}"),
        "nested-100000": deep,
        "unclosed-100000": b"[" * 100_000,
        "two-bytes-of-nothing": b"  ",
        "nul-bytes": bytes(64),
    }
    for name, form in forms.items():
        yield Attack(f"json-{name}", envelope(sound[:8], form, PUBLISHER) + sound[size:], "header: ")
    for name, form in {"array": b"[]", "null": b"null", "string": b'"x"', "number": b"17", "true": b"true"}.items():
        yield Attack(f"header-is-{name}", envelope(sound[:8], form, PUBLISHER) + sound[size:], "not an object")


def _signatures(sound: bytes) -> Iterator[Attack]:
    fields, size = split_envelope(sound)
    signed, signature, rest = sound[: size - SIGNATURE_BYTES], sound[size - SIGNATURE_BYTES : size], sound[size:]
    does_not_match = "signature does not match"
    for place in (0, 31, 32, 63):
        flipped = signature[:place] + bytes([signature[place] ^ 1]) + signature[place + 1 :]
        yield Attack(f"signature-bit-in-byte-{place}", signed + flipped + rest, does_not_match)
    high = (int.from_bytes(signature[32:], "little") + ED25519_ORDER).to_bytes(32, "little")
    yield Attack("signature-s-plus-order", signed + signature[:32] + high + rest, does_not_match)
    yield Attack("signature-zeros", signed + bytes(64) + rest, does_not_match)
    yield Attack("signature-without-context", signed + PUBLISHER._key.sign(signed) + rest, does_not_match)
    yield Attack("signature-by-another", signed + MALLORY.sign(signed) + rest, does_not_match)
    address = fields["address"].encode()
    changed = signed.replace(address, bytes(reversed(address)))
    yield Attack("header-changed-after-signing", changed + signature + rest, does_not_match)
    relabelled = signed.replace(str(PUBLISHER.public).encode(), str(MALLORY.public).encode())
    yield Attack("publisher-changed-after-signing", relabelled + signature + rest, does_not_match)
    yield Attack("signed-by-mallory", _resigned(sound, MALLORY, str(MALLORY.public)), "trust list", untrusted=True)
    yield from _publishers(sound)


def _publishers(sound: bytes) -> Iterator[Attack]:
    public = str(PUBLISHER.public)
    texts = {
        "uppercase": public.upper(),
        "prefixed": f"ed25519:{public}",
        "short": public[:-1],
        "empty": "",
        "null": None,
        "number": 1,
        "list": [public],
        "full-width-digits": "\uff10" * 64,
    }
    for name, text in texts.items():
        yield Attack(f"publisher-{name}", _resigned(sound, PUBLISHER, text), "publisher")
    fields, size = split_envelope(sound)
    del fields["publisher"]
    data = envelope(sound[:8], canonical.encode(fields), PUBLISHER) + sound[size:]
    yield Attack("publisher-missing", data, "publisher")
    off_curve = (2).to_bytes(32, "little").hex()
    yield Attack("publisher-not-on-the-curve", _resigned(sound, PUBLISHER, off_curve), "signature does not match")
    fields["publisher"] = SMALL_ORDER_POINT.hex()
    header = canonical.encode(fields)
    signed = sound[:8] + struct.pack("<I", len(header)) + header
    data = signed + SMALL_ORDER_POINT + bytes(32) + sound[size:]
    yield Attack("publisher-of-small-order", data, "trust list", untrusted=True)


def _resigned(sound: bytes, key: SigningKey, publisher: object) -> bytes:
    fields, size = split_envelope(sound)
    header = json.dumps({**fields, "publisher": publisher}, sort_keys=True, separators=(",", ":")).encode()
    return envelope(sound[:8], header, key) + sound[size:]


def truncations(sound: bytes) -> Iterator[Attack]:
    """A block that ends early behind its envelope: at and next to the end of each segment."""
    fields, size = split_envelope(sound)
    for segment in fields["segments"]:
        start = size + segment["offset"]
        ends = {"start": start, "start+1": start + 1, "end-1": start + segment["length"] - 1}
        for name, end in ends.items():
            says = "truncated"
            yield Attack(f"edge-truncated-in-layer-{segment['layer']}-{name}", sound[:end], says, Reader.EDGE)
            says = f"layer {segment['layer']}: hash"
            yield Attack(f"client-truncated-in-layer-{segment['layer']}-{name}", sound[:end], says, Reader.CLIENT)
    for name, extra in {"one-byte": b"\x00", "a-newline": b"\n", "the-object-again": sound}.items():
        yield Attack(f"trailing-{name}", sound + extra, "trailing bytes", Reader.EDGE)
