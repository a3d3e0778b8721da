"""Prefix files of tiny models, written without torch: what the tests of the local store start from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcdn.block import seal_block
from kvcdn.digest import Digest, hash_bytes
from kvcdn.keys import BlockName, ModelIdentity, Namespace, PrefixNames
from kvcdn.layout import LayerSpec, Layout, TensorSpec
from kvcdn.prefixfile import HeldBlock, PrefixFile, PrefixVerifier, open_prefix_file
from kvcdn.signing import PublicKey, SigningKey, TrustList
from kvcdn.stores.local import LocalStore
from kvcdn.stores.mapped import FileKey
from support.blocks import make_producer

PUBLISHER = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
"""The same in every process."""

TRUST = TrustList.of(PUBLISHER.public)

BLOCK = 1024

ROOM = 64


def two_layers(window: int | None = None, name: str = "tiny") -> ModelIdentity:
    """A model of two layers of different shapes, the second with a window where one is given: blocks of 1,024 tokens."""
    full = LayerSpec("kv", (TensorSpec("k", 1, 2, "float16"), TensorSpec("v", 1, 3, "float16")))
    pair = (TensorSpec("k", 2, 2, "float32"), TensorSpec("v", 2, 2, "float32"))
    second = LayerSpec("kv", pair) if window is None else LayerSpec("window", pair, window)
    layout = Layout((full, second, LayerSpec("none", ())))
    return ModelIdentity(Digest(hash_bytes(name.encode())), layout, name)


@dataclass(frozen=True)
class Prefix:
    """A published prefix: `choices` makes its tokens, block by block, and `tail` tokens follow."""

    model: ModelIdentity
    choices: tuple[int, ...]
    tail: int = 0
    first: tuple[int, ...] = (0, 0, 0)
    key: SigningKey = PUBLISHER

    @cached_property
    def token_ids(self) -> list[int]:
        return [choice for choice in self.choices for _ in range(BLOCK)] + [7] * self.tail

    @cached_property
    def names(self) -> tuple[BlockName, ...]:
        return PrefixNames.of(self.model, Namespace.public(), self.token_ids).blocks

    def raw(self, name: BlockName) -> list[list[bytes]]:
        """The tensors of a block: the same for the same block of any prefix."""
        numbers = random.Random(bytes(name.address))
        return [
            [numbers.randbytes(name.tokens * tensor.bytes_per_token) for tensor in spec.tensors]
            for spec in self.model.layout.layers
        ]

    @cached_property
    def envelopes(self) -> list[bytes]:
        producer = make_producer(self.model)
        return [bytes(seal_block(self.model, name, producer, self.raw(name), self.key)[0]) for name in self.names]

    @cached_property
    def file(self) -> PrefixFile:
        tokens = len(self.token_ids)
        held = [
            HeldBlock(name.address, name.tokens, len(envelope))
            for name, envelope in zip(self.names, self.envelopes, strict=True)
        ]
        return PrefixFile(self.model.tag, self.model.name, tokens, tokens + ROOM, self.first, tuple(held))

    def write(self, store: LocalStore) -> FileKey | None:
        """Writes the prefix into a store, as a client does; None where the store did not want it."""
        draft = store.begin(self.file, self.model.layout)
        if draft is None:
            return None
        with draft:
            # Piece by piece, as the tensors come; what follows the last row of each is a hole.
            image = memoryview(self.image())
            places = [place for layer in self.file.places(self.model.layout) for place in layer]
            draft.write(0, image[: places[0].offset])
            for place in places:
                rows = place.span(place.first, self.file.tokens)
                draft.write(rows.start, image[rows])
            return draft.commit()

    def check(self, data: memoryview, trust: TrustList = TRUST) -> list[PublicKey]:
        """Checks all of a file's bytes as a reader does; who published the blocks of which it has rows."""
        verifier = PrefixVerifier(open_prefix_file(data, "file"), data, self.model, "file")
        headers = [verifier.check_block(name, trust) for name in self.names]
        return [header.publisher for header in headers if header is not None]

    def image(self) -> bytearray:
        """The file's bytes."""
        data = bytearray(self.file.size(self.model.layout))
        head = self.file.encoded + b"".join(self.envelopes)
        data[: len(head)] = head
        for name in self.names:
            for places, tensors in zip(self.file.places(self.model.layout), self.raw(name), strict=True):
                for place, raw in zip(places, tensors, strict=True):
                    if name.start >= place.first:
                        data[place.span(name.start, name.end)] = raw
        return data
