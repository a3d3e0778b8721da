"""Every hostile file of tests/attacks ends in exactly one error that names the object and the check."""

from __future__ import annotations

import pytest
from attacks.attack import Attack, Reader
from attacks.blocks import other_namespace_name
from attacks.collection import block_attacks, manifest_attacks
from attacks.forge import (
    MODEL,
    NAMES,
    PUBLISHER,
    manifest_object_key,
    raw_tensors,
    sound_blocks,
    sound_manifest,
    tail,
    tail_key,
)

from kvcdn.block import SegmentVerifier, open_header, open_segment
from kvcdn.errors import CorruptError, KvcdnError, UntrustedError
from kvcdn.keys import BlockName
from kvcdn.manifest import Manifest, open_manifest
from kvcdn.seal import ObjectKeys
from kvcdn.signing import TrustList

TRUST = TrustList.of(PUBLISHER.public)

TAIL = NAMES.blocks[-1]

BLOCK_ATTACKS = block_attacks()

MANIFEST_ATTACKS = manifest_attacks()


def read_as_client(data: bytes, name: BlockName = TAIL) -> list[list[bytes]]:
    """All of FORMAT.md section 6 for a client: the raw tensors by layer."""
    what = tail_key()
    header = open_header(data, what)
    TRUST.require(header.publisher, what)
    header.require(MODEL, name, what)
    keys = ObjectKeys(name.content_key, header.salt)
    keys.check_commitment(header.commitment, what)
    scratch = bytearray()
    layers = []
    for index, segment in enumerate(header.segments):
        start = header.envelope_bytes + segment.offset
        outs = [bytearray(part.raw_bytes) for part in segment.parts]
        stored = memoryview(data)[start : start + segment.length]
        open_segment(header, keys, index, stored, scratch, [memoryview(out) for out in outs])
        layers.append([bytes(out) for out in outs])
    return layers


def read_as_edge(data: bytes) -> None:
    """All of FORMAT.md section 6 for an edge with a trust list."""
    what = tail_key()
    header = open_header(data, what)
    TRUST.require(header.publisher, what)
    if header.address != TAIL.address:
        raise CorruptError(f"{what}: address is another")
    verifier = SegmentVerifier(header)
    verifier.update(data)
    verifier.finish()


def read_manifest(data: bytes) -> Manifest:
    """A manifest as any reader takes it."""
    manifest = open_manifest(data, manifest_object_key())
    assert manifest.publisher is not None
    TRUST.require(manifest.publisher, manifest_object_key())
    return manifest


def refusal(attack: Attack, error: KvcdnError) -> None:
    """Asserts that `error` is the one that `attack` must meet, and names the object."""
    expected = UntrustedError if attack.untrusted else CorruptError
    assert expected is type(error)
    assert attack.says in str(error)
    assert len(str(error)) < 1000


def by(attacks: tuple[Attack, ...], *readers: Reader) -> list[object]:
    """Those attacks that one of `readers` must stop, as test parameters."""
    return [pytest.param(attack, id=attack.name) for attack in attacks if attack.reader in readers]


def test_attack_names_are_unique() -> None:
    """Two attacks of one name would hide one another in a report."""
    for attacks in (BLOCK_ATTACKS, MANIFEST_ATTACKS):
        names = [attack.name for attack in attacks]
        assert sorted(set(names)) == sorted(names)


def test_sound_objects_pass() -> None:
    """Without an attack the same readers accept what the attacks are made from, and read the tensors back."""
    data = sound_blocks()[-1]
    read_as_edge(data)
    assert raw_tensors(TAIL) == read_as_client(data)
    assert NAMES.manifest_address == read_manifest(sound_manifest()).address
    assert data == tail().write()


@pytest.mark.parametrize("attack", by(BLOCK_ATTACKS, Reader.EVERYONE, Reader.CLIENT))
def test_client_refuses_block(attack: Attack) -> None:
    """A client ends in one error before any tensor reaches a model."""
    with pytest.raises(KvcdnError) as caught:
        read_as_client(attack.data)
    refusal(attack, caught.value)
    named = tail_key() in str(caught.value) or str(TAIL.address) in str(caught.value)
    assert named


@pytest.mark.parametrize("attack", by(BLOCK_ATTACKS, Reader.EVERYONE, Reader.EDGE))
def test_edge_refuses_block(attack: Attack) -> None:
    """An edge without keys ends in one error before it commits the object."""
    with pytest.raises(KvcdnError) as caught:
        read_as_edge(attack.data)
    refusal(attack, caught.value)
    named = tail_key() in str(caught.value) or str(TAIL.address) in str(caught.value)
    assert named


@pytest.mark.parametrize("attack", by(MANIFEST_ATTACKS, Reader.EVERYONE))
def test_reader_refuses_manifest(attack: Attack) -> None:
    """A manifest that contradicts itself is no manifest."""
    with pytest.raises(KvcdnError) as caught:
        read_manifest(attack.data)
    refusal(attack, caught.value)
    assert manifest_object_key() in str(caught.value)


def test_other_namespace_cannot_open() -> None:
    """Somebody with the text but without the namespace's secret asks for another address and holds another key."""
    other = other_namespace_name()
    assert other.address != TAIL.address
    with pytest.raises(CorruptError, match="address is"):
        read_as_client(sound_blocks()[-1], other)
    header = open_header(sound_blocks()[-1], "block")
    with pytest.raises(CorruptError, match="key commitment"):
        ObjectKeys(other.content_key, header.salt).check_commitment(header.commitment, "block")


def test_error_does_not_freeze_scratch() -> None:
    """After a refused segment, whose error a caller keeps, the same scratch memory still grows for the next one."""
    data = next(attack.data for attack in BLOCK_ATTACKS if attack.name == "chunk-first-block-far-away")
    header = open_header(data, "block")
    keys = ObjectKeys(TAIL.content_key, header.salt)
    scratch = bytearray()
    segment = header.segments[0]
    outs = [memoryview(bytearray(part.raw_bytes)) for part in segment.parts]
    with pytest.raises(CorruptError) as kept:
        open_segment(header, keys, 0, data[header.envelope_bytes :][: segment.length], scratch, outs)
    scratch.extend(bytes(1000))
    assert "does not decode" in str(kept.value)
