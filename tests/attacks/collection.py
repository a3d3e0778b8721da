"""All attacks, on the tail block and on the manifest of the forge's document."""

from __future__ import annotations

from functools import cache

from attacks import blocks, manifests
from attacks.attack import Attack
from attacks.envelopes import envelope_attacks, truncations
from attacks.fields import field_attacks
from attacks.forge import ForgedBlock, sound_blocks, sound_manifest, split_envelope, tail, write_manifest

from kvcdn.envelope import BLOCK_MAGIC, MANIFEST_MAGIC


@cache
def block_attacks() -> tuple[Attack, ...]:
    """Everything that may lie under a block's name."""
    sound, block = sound_blocks()[-1], tail()
    return (
        *envelope_attacks(sound, MANIFEST_MAGIC),
        *truncations(sound),
        *field_attacks(block.header, lambda header: ForgedBlock(block.name, header, block.stored, block.encoded).write()),
        *blocks.structure_attacks(),
        *blocks.identity_attacks(),
        *blocks.encryption_attacks(),
        *blocks.codec_attacks(),
    )


@cache
def manifest_attacks() -> tuple[Attack, ...]:
    """Everything that may lie under a manifest's name."""
    sound = sound_manifest()
    return (
        *envelope_attacks(sound, BLOCK_MAGIC),
        *field_attacks(split_envelope(sound)[0], write_manifest),
        *manifests.manifest_attacks(),
    )
