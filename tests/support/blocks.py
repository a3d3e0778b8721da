"""Published documents made of random bytes: real envelopes, signatures, encryption and hashes, without a model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np

from kvcdn.block import open_header, seal_block
from kvcdn.certificate import Certificate
from kvcdn.codec import Encoded, Rows
from kvcdn.codecs.basis import Basis, TensorBasis
from kvcdn.codecs.choice import GridEncoder, TensorEncoder, TransformEncoder, encode_refinement
from kvcdn.codecs.rope import Rope
from kvcdn.digest import Buffer, Digest, hash_bytes
from kvcdn.keys import TRANSFORMED, ModelIdentity, Namespace, PrefixNames, block_key, manifest_key, refinement_of
from kvcdn.layout import Layout, TensorSpec
from kvcdn.manifest import BlockEntry, Manifest
from kvcdn.producer import Producer
from kvcdn.signing import SigningKey
from kvcdn.store import BlobStore

CREATED = 1_700_000_000
"""A fixed time, so that manifests of equal documents differ only where their blocks do."""


@dataclass(frozen=True)
class Document:
    """One published prefix: its names, the key that signed it, and every object it consists of."""

    model: ModelIdentity
    names: PrefixNames
    key: SigningKey
    token_ids: tuple[int, ...] = field(repr=False)
    manifest_key: str
    manifest_bytes: bytes = field(repr=False)
    blocks: dict[str, bytes] = field(repr=False)
    """Object key to stored bytes, in chain order."""
    raw: dict[str, list[list[bytes]]] = field(repr=False)
    """Object key to the raw tensors, by layer and tensor."""

    @property
    def objects(self) -> dict[str, bytes]:
        """Every object under its key: blocks in order, the manifest last."""
        return {**self.blocks, self.manifest_key: self.manifest_bytes}

    @property
    def addresses(self) -> list[str]:
        return [str(block.address) for block in self.names.blocks]

    def publish(self, store: BlobStore) -> None:
        """Creates every object in `store`, blocks first."""
        for key, data in self.objects.items():
            store.create(key, [data])


def make_model(*, layers: int = 2, heads: int = 2, dim: int = 32, dtype: str = "bfloat16", seed: int = 0) -> ModelIdentity:
    """A model identity whose fingerprint follows from `seed`; by default 512 bytes a token, hence blocks of 1,024 tokens."""
    fingerprint = Digest(hash_bytes(b"test model %d" % seed))
    return ModelIdentity(fingerprint, Layout.uniform_kv(layers, heads, dim, dtype), f"test-model-{seed}")


def make_producer(model: ModelIdentity) -> Producer:
    """A producer as a publisher of `model` would record it."""
    return Producer("2.6", "5.15", "cpu", "sdpa", model.layout.block_tokens)


CERTIFICATE = Certificate(256, 32, 32, 1_800_000, 12_000_000, 1_700_000, 15_900_000, 15_800_000, 980_000)
"""The figures of a real document in int8."""


def make_basis(layout: Layout, seed: int = 0) -> Basis:
    """A random basis, K with rotary embedding in either order of pairs, in groups of one head and of all."""
    rng = np.random.default_rng(seed)

    def tensor(spec: TensorSpec, number: int) -> TensorBasis:
        groups = spec.heads if number % 2 else 1
        width = spec.heads * spec.dim // groups
        turns = [np.linalg.qr(rng.normal(size=(width, width)))[0] for _ in range(groups)]
        scales = np.array([np.abs(turn).max() / 127 for turn in turns], np.float32)
        matrices = np.stack([np.rint(turn / scale).astype(np.int8) for turn, scale in zip(turns, scales, strict=True)])
        frequencies = (10_000.0 ** -np.linspace(0, 0.9, spec.dim // 4)).astype("<f8").tobytes()
        rope = Rope(frequencies, interleaved=number % 4 == 0) if spec.name == "k" else None
        return TensorBasis(rng.normal(0, 0.05, (spec.heads, spec.dim)).astype("<f4"), scales, matrices, rope)

    numbered = iter(range(1000))
    return Basis.build(layout, [[tensor(spec, next(numbered)) for spec in layer.tensors] for layer in layout.layers])


def _manifest(
    model: ModelIdentity,
    names: PrefixNames,
    tokens: int,
    entries: list[BlockEntry],
    producer: Producer,
    certificate: Certificate | None = None,
) -> Manifest:
    return Manifest(
        address=names.manifest_address,
        fingerprint=model.fingerprint,
        model_name=model.name,
        layout=model.layout,
        precision=model.precision,
        tokens=tokens,
        blocks=tuple(entries),
        created=CREATED,
        expires=None,
        label="",
        producer=producer,
        certificate=certificate,
    )


def make_lossy_document(precision: str) -> Document:
    """A document of two blocks of smooth random KV in a lossy precision; those that need a basis have that of `make_basis`."""
    model = replace(make_model(layers=2, heads=2, dim=32), precision=precision)
    rng = np.random.default_rng(3)
    token_ids = tuple(range(1100))
    names, key, producer = PrefixNames.of(model, Namespace.public(), token_ids), SigningKey.generate(), make_producer(model)
    blocks, raw, entries = {}, {}, []
    encoder: TensorEncoder = GridEncoder(model.layout, precision, len(token_ids))
    if precision in TRANSFORMED:
        exponents = [[rng.integers(-3, 4, 1100, np.int16) for _ in layer.tensors] for layer in model.layout.layers]
        encoder = TransformEncoder(model.layout, precision, make_basis(model.layout), exponents)
    for name in names.blocks:
        tensors: list[list[Buffer | Encoded]] = []
        for index, layer in enumerate(model.layout.layers):
            values = [rng.normal(0, 0.05, tensor.shape(name.tokens)).astype("<f4") for tensor in layer.tensors]
            patterns = [(array.view("<u4") >> 16).astype("<u2").tobytes() for array in values]
            tensors.append([encoder.encode(data, index, place, name) for place, data in enumerate(patterns)])
        data = b"".join(seal_block(model, name, producer, tensors, key, CERTIFICATE, encoder.basis))
        object_key = block_key(model.tag, name.address)
        blocks[object_key] = data
        raw[object_key] = [
            [bytes(part.decoded) if isinstance(part, Encoded) else bytes(part) for part in each] for each in tensors
        ]
        entries.append(BlockEntry(name.address, name.tokens, len(data), open_header(data, "block").etag))
    manifest = _manifest(model, names, len(token_ids), entries, producer, CERTIFICATE)
    address = manifest_key(model.tag, names.manifest_address)
    return Document(model, names, key, token_ids, address, manifest.seal(key), blocks, raw)


def make_refinement(coarse: Document) -> Document:
    """What makes a document of `make_lossy_document` exact: random KV near it."""
    model = replace(coarse.model, precision=refinement_of(coarse.model.precision))
    rng = np.random.default_rng(4)
    names, key, producer = (
        PrefixNames.of(model, Namespace.public(), coarse.token_ids),
        SigningKey.generate(),
        make_producer(model),
    )
    blocks, raw, entries = {}, {}, []
    for name, near, decoded in zip(names.blocks, coarse.blocks.values(), coarse.raw.values(), strict=True):
        tensors: list[list[Buffer | Encoded]] = []
        exact = []
        for layer, nears in zip(model.layout.layers, decoded, strict=True):
            values = [(np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4") for data in nears]
            moved = [array * rng.normal(1, 0.01, array.shape).astype("<f4") for array in values]
            exact.append([(array.view("<u4") >> 16).astype("<u2").tobytes() for array in moved])
            of_layer = zip(exact[-1], layer.tensors, nears, strict=True)
            tensors.append(
                [
                    encode_refinement(data, Rows(one.dtype, one.shape(name.tokens), coarse=data_near))
                    for data, one, data_near in of_layer
                ]
            )
        data = b"".join(seal_block(model, name, producer, tensors, key, coarse=open_header(near, "block").etag))
        object_key = block_key(model.tag, name.address)
        blocks[object_key], raw[object_key] = data, exact
        entries.append(BlockEntry(name.address, name.tokens, len(data), open_header(data, "block").etag))
    manifest = _manifest(model, names, len(coarse.token_ids), entries, producer)
    address = manifest_key(model.tag, names.manifest_address)
    return Document(model, names, key, coarse.token_ids, address, manifest.seal(key), blocks, raw)


def make_document(
    *,
    tokens: int = 2500,
    layers: int = 2,
    heads: int = 2,
    dim: int = 32,
    dtype: str = "bfloat16",
    seed: int = 0,
    key: SigningKey | None = None,
) -> Document:
    """A document of random tokens with random KV. Equal `seed`s give equal names; the layout gives the block length."""
    rng = random.Random(seed)
    model = make_model(layers=layers, heads=heads, dim=dim, dtype=dtype)
    token_ids = tuple(rng.randrange(50_000) for _ in range(tokens))
    names = PrefixNames.of(model, Namespace.public(), token_ids)
    key = key or SigningKey.generate()
    producer = make_producer(model)
    blocks: dict[str, bytes] = {}
    raw: dict[str, list[list[bytes]]] = {}
    entries = []
    for name in names.blocks:
        tensors = [
            [rng.randbytes(name.tokens * tensor.bytes_per_token) for tensor in layer.tensors] for layer in model.layout.layers
        ]
        data = b"".join(seal_block(model, name, producer, tensors, key))
        object_key = block_key(model.tag, name.address)
        blocks[object_key], raw[object_key] = data, tensors
        entries.append(BlockEntry(name.address, name.tokens, len(data), open_header(data, "block").etag))
    manifest = _manifest(model, names, len(token_ids), entries, producer)
    return Document(
        model, names, key, token_ids, manifest_key(model.tag, names.manifest_address), manifest.seal(key), blocks, raw
    )
