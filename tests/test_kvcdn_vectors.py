"""The package gives, for every golden vector, the recorded value or the recorded error."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcdn import block, canonical
from kvcdn.block import open_header, open_segment, seal_block
from kvcdn.codec import Rows, decode_part
from kvcdn.codecs.basis import Basis
from kvcdn.digest import Digest, ModelTag, derive
from kvcdn.errors import CorruptError, IntegrityError, UntrustedError
from kvcdn.keys import ModelIdentity, Namespace, PrefixNames, block_key, manifest_key, model_tag
from kvcdn.layout import LayerSpec, Layout, TensorSpec
from kvcdn.manifest import Manifest, open_manifest
from kvcdn.model.fingerprint import adapted_fingerprint, fingerprint_adapter
from kvcdn.producer import Producer
from kvcdn.seal import ObjectKeys
from kvcdn.signing import PublicKey, SigningKey, TrustList

VECTORS = Path(__file__).parent / "vectors"

ERRORS = {"CorruptError": CorruptError, "UntrustedError": UntrustedError}


def vectors(name: str) -> Any:
    return json.loads((VECTORS / name).read_text("utf-8"))


def cases(name: str, field: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in vectors(name)[field]]


GOLDEN = vectors("objects.json")["documents"]


def golden_names(case: Any) -> tuple[Manifest, PrefixNames]:
    """A golden document's manifest, and its names recomputed from its token ids."""
    manifest = open_manifest(base64.b64decode(case["manifest"]), "golden manifest")
    model = ModelIdentity(manifest.fingerprint, manifest.layout, manifest.model_name)
    token_ids = [case["token_step"] * index % case["token_modulus"] for index in range(case["tokens"])]
    return manifest, PrefixNames.of(model, Namespace.public(), token_ids)


def open_tensors(data: bytes, names: PrefixNames, index: int, trust: TrustList) -> list[list[bytes]]:
    """The raw tensors of block `index`, by layer, after every check."""
    name = names.blocks[index]
    header = open_header(data, "golden block")
    trust.require(header.publisher, "golden block")
    header.require(names.model, name, "golden block")
    keys = ObjectKeys(name.content_key, header.salt)
    keys.check_commitment(header.commitment, "golden block")
    layers = []
    for number, segment in enumerate(header.segments):
        outs = [bytearray(part.raw_bytes) for part in segment.parts]
        stored = data[header.envelope_bytes + segment.offset :][: segment.length]
        open_segment(header, keys, number, stored, bytearray(), [memoryview(out) for out in outs])
        layers.append([bytes(out) for out in outs])
    return layers


@pytest.mark.parametrize("case", cases("derivations.json", "derive"))
def test_derive(case: Any) -> None:
    """Key derivation is BLAKE3's, under every context string."""
    assert case["output"] == derive(case["context"], bytes.fromhex(case["material"])).hex()


@pytest.mark.parametrize("case", cases("derivations.json", "model_tags"))
def test_model_tag(case: Any) -> None:
    """A model tag is the recorded 16 bytes."""
    assert ModelTag.parse(case["model_tag"], "tag") == model_tag(Digest.parse(case["fingerprint"], "fingerprint"))


@pytest.mark.parametrize("case", cases("derivations.json", "adapters"))
def test_adapter(tmp_path: Path, case: Any) -> None:
    """An adapter's digest follows from its two files, and the fingerprint from what is applied, in order."""
    (tmp_path / "adapter_config.json").write_text(case["config"], "utf-8")
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes.fromhex(case["weights"]))
    assert case["digest"] == str(fingerprint_adapter(tmp_path))
    applied = [(Digest.parse(digest, "adapter"), how, dtype) for digest, how, dtype in case["applied"]]
    assert case["fingerprint"] == str(adapted_fingerprint(Digest.parse(case["base"], "base"), applied))


@pytest.mark.parametrize("case", cases("layouts.json", "layouts"))
def test_layout(case: Any) -> None:
    """A layout is read, written back as it was, and gives digest, bytes per token and block length."""
    value = {"layers": [layer for times, layer in case["runs"] for _ in range(times)], "v": 1}
    layout = Layout.from_json(value, "layout")
    assert value == layout.to_json()
    assert case["digest"] == str(layout.digest)
    assert case["bytes_per_token"] == layout.bytes_per_token
    assert case["block_tokens"] == layout.block_tokens


@pytest.mark.parametrize(("per_token", "length"), vectors("layouts.json")["block_tokens"])
def test_block_length(per_token: int, length: int) -> None:
    """The block length at and next to every power of two."""
    layout = Layout((LayerSpec("kv", (TensorSpec("k", 1, 1, "float16"), TensorSpec("v", 1, 1, "float16"))),))
    layout.__dict__["bytes_per_token"] = per_token
    assert length == layout.block_tokens


@pytest.mark.parametrize("case", cases("names.json", "prefixes"))
def test_names(case: Any) -> None:
    """Every name and key of a prefix follows from its token ids."""
    layout = Layout.from_json(case["layout"], "layout")
    model = ModelIdentity(Digest.parse(case["fingerprint"], "fingerprint"), layout, "any name")
    secret = case["namespace_secret"]
    namespace = Namespace.public() if secret is None else Namespace.private("any name", bytes.fromhex(secret))
    names = PrefixNames.of(model, namespace, case["token_ids"])
    assert case["seed"] == model.seed(namespace).hex()
    assert case["model_tag"] == str(model.tag)
    found = [
        {"start": b.start, "tokens": b.tokens, "address": str(b.address), "content_key": b.content_key.hex()}
        for b in names.blocks
    ]
    assert case["blocks"] == found
    assert case["manifest_address"] == str(names.manifest_address)
    assert case["block_key"] == block_key(model.tag, names.blocks[0].address)
    assert case["manifest_key"] == manifest_key(model.tag, names.manifest_address)
    assert len(case["token_ids"]) == names.tokens


@pytest.mark.parametrize("case", cases("canonical.json", "accepted"))
def test_canonical_accepted(case: Any) -> None:
    """Canonical bytes are read, and written again as they were."""
    data = bytes.fromhex(case["hex"])
    assert data == canonical.encode(canonical.decode(data, "vector"))


@pytest.mark.parametrize("case", cases("canonical.json", "refused"))
def test_canonical_refused(case: Any) -> None:
    """Every other form of JSON, and everything that is none, ends in the one error."""
    with pytest.raises(CorruptError, match=r"^vector: ") as caught:
        canonical.decode(bytes.fromhex(case["hex"]), "vector")
    assert case["error"] == type(caught.value).__name__


@pytest.mark.parametrize("case", cases("objects.json", "documents"))
def test_golden_document(case: Any) -> None:
    """Manifest and blocks of a golden document have the recorded fields, digests and tensors."""
    manifest, names = golden_names(case)
    assert case["manifest_fields"]["address"] == str(names.manifest_address) == str(manifest.address)
    assert case["manifest_fields"]["label"] == manifest.label
    assert case["manifest_fields"]["expires"] == manifest.expires
    trust = TrustList.of(PublicKey.from_text(case["publisher"]))
    for index, expected in enumerate(case["blocks"]):
        data = base64.b64decode(expected["object"])
        header = open_header(data, "golden block")
        assert expected["etag"] == str(header.etag) == str(manifest.blocks[index].etag)
        assert expected["size"] == header.size == manifest.blocks[index].size == len(data)
        assert expected["raw_digests"] == [str(segment.raw_digest) for segment in header.segments]
        assert expected["fields"]["producer"] == header.producer.to_json()
        tensors = open_tensors(data, names, index, trust)
        assert expected["tensor_blake3"] == [[blake3(raw).hexdigest() for raw in layer] for layer in tensors]
        keys = ObjectKeys(names.blocks[index].content_key, header.salt)
        assert expected["raw_digests"] == [str(keys.raw_digest(*layer)) for layer in tensors]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in GOLDEN if case["codecs"] == ["raw"]])
def test_writer_reproduces_golden_bytes(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    """With the recorded salt the writer gives the recorded objects, byte for byte (raw parts only: no zstd version shows)."""
    manifest, names = golden_names(case)
    signing = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(case["signing_key"])))
    expected = base64.b64decode(case["blocks"][0]["object"])
    tensors = open_tensors(expected, names, 0, TrustList.of(signing.public))
    fields = case["blocks"][0]["fields"]
    monkeypatch.setattr(block.os, "urandom", lambda size: bytes.fromhex(fields["salt"])[:size])
    producer = Producer.from_json(fields["producer"], "golden producer")
    assert expected == b"".join(seal_block(names.model, names.blocks[0], producer, tensors, signing))
    assert base64.b64decode(case["manifest"]) == manifest.seal(signing)


@pytest.mark.parametrize("case", cases("refused.json", "objects"))
def test_golden_refusals(case: Any) -> None:
    """Each recorded hostile object ends in the recorded error, at the recorded check."""
    _, names = golden_names(GOLDEN[0])
    trust = TrustList.of(PublicKey.from_text(GOLDEN[0]["publisher"]))
    data = base64.b64decode(case["object"])

    def read() -> None:
        if case["kind"] == "manifest":
            trust.require(open_manifest(data, "golden manifest").publisher or PublicKey(bytes(32)), "golden manifest")
        else:
            open_tensors(data, names, len(names.blocks) - 1, trust)

    with pytest.raises(IntegrityError, match=case["check"]) as caught:
        read()
    assert ERRORS[case["error"]] is type(caught.value)


@pytest.mark.parametrize("case", cases("codecs.json", "parts"))
def test_golden_parts(case: Any) -> None:
    """Each recorded part of a codec that knows numbers decodes to the recorded bits, whatever the versions of the libraries."""
    basis = None
    if "basis" in case:
        layout, (layer, tensor) = Layout.from_json(case["layout"], "layout"), case["tensor"]
        basis = Basis.parse(base64.b64decode(case["basis"]), layout, "golden basis").tensors[layer][tensor]
    rows = Rows(
        case["dtype"], tuple(case["shape"]), case.get("start", 0), basis, base64.b64decode(case.get("coarse", "")) or None
    )
    out = bytearray(math.prod(rows.shape) * rows.typesize)
    decode_part(case["codec"], base64.b64decode(case["encoded"]), rows, memoryview(out), "golden part")
    assert case["decoded_blake3"] == blake3(out).hexdigest()
