"""Attacks on a manifest: fields that contradict each other (FORMAT.md section 5), by a publisher with a trusted key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attacks.attack import Attack
from attacks.forge import MALLORY, edited, sound_manifest, split_envelope, write_manifest


def manifest_attacks() -> Iterator[Attack]:
    """Everything behind the envelope."""
    data = sound_manifest()
    header, _ = split_envelope(data)
    for name, extra in {"one-byte": b"\x00", "a-newline": b"\n", "itself": data}.items():
        yield Attack(f"trailing-{name}", data + extra, "trailing bytes")
    yield Attack("mallory-signs-a-sound-manifest", write_manifest(header, MALLORY), "trust list", untrusted=True)
    blocks, layers = header["blocks"], header["layout"]["layers"]
    first, last = blocks
    length, total = header["block_tokens"], header["tokens"]
    follows, counts = "does not follow", "do not add up"
    heads = ("layout", "layers", 0, "tensors", 0, "shape")
    index = {"dtype": "bfloat16", "name": "i", "shape": [1, 16]}
    state = {"dtype": "float32", "name": "c0", "shape": [4, 4]}
    pair, two_headed = layers[1]["tensors"], {**index, "shape": [2, 16]}
    changes: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
        "tag-of-another-fingerprint": (("model",), "0" * 32, follows),
        "fingerprint-of-another-tag": (("fingerprint",), "0" * 64, follows),
        "block-length-halved": (("block_tokens",), length // 2, follows),
        "schedule-of-other-passes": (("producer", "chunk_tokens"), length // 2, follows),
        "tokens-one-more": (("tokens",), total + 1, counts),
        "tokens-one-less": (("tokens",), total - 1, counts),
        "tokens-a-block-more": (("tokens",), total + length, counts),
        "tokens-beyond-every-model": (("tokens",), (1 << 24) + 1, "tokens"),
        "first-block-short": (("blocks",), [{**first, "tokens": length - 1}, {**last, "tokens": 9}], counts),
        "blocks-reordered": (("blocks",), [last, first], counts),
        "last-block-missing": (("blocks",), [first], counts),
        "first-block-missing": (("blocks",), [last], counts),
        "a-block-too-many": (("blocks",), [first, last, last], counts),
        "blocks-4097": (("blocks",), [first] * 4097, "blocks"),
        "empty-block": (("blocks", 1, "tokens"), 0, "tokens"),
        "block-of-no-bytes": (("blocks", 0, "size"), 0, "size"),
        "block-of-2^37-bytes": (("blocks", 0, "size"), 2**37, "size"),
        "layout-of-the-next-version": (("layout", "v"), 2, "v"),
        "layout-without-layers": (("layout", "layers"), [], "layers"),
        "layout-of-1025-layers": (("layout", "layers"), layers * 342, "layers"),
        "layout-of-unknown-kind": (("layout", "layers", 0, "kind"), "linear", "kind"),
        "layout-no-states": (("layout", "layers", 0, "state"), [], "state"),
        "layout-17-states": (("layout", "layers", 0, "state"), [state] * 17, "state"),
        "layout-state-twice": (("layout", "layers", 0, "state"), [state, state], "each once"),
        "layout-states-out-of-order": (("layout", "layers", 0, "state"), [{**state, "name": "r0"}, state], "each once"),
        "layout-state-of-unknown-name": (("layout", "layers", 0, "state"), [{**state, "name": "c8"}], "name"),
        "layout-state-named-k": (("layout", "layers", 0, "state"), [{**state, "name": "k"}], "name"),
        "layout-state-of-unknown-dtype": (("layout", "layers", 0, "state"), [{**state, "dtype": "float64"}], "dtype"),
        "layout-state-of-no-dimensions": (("layout", "layers", 0, "state"), [{**state, "shape": []}], "shape"),
        "layout-state-of-five-dimensions": (("layout", "layers", 0, "state"), [{**state, "shape": [1] * 5}], "shape"),
        "layout-state-of-no-elements": (("layout", "layers", 0, "state"), [{**state, "shape": [4, 0]}], "shape"),
        "layout-state-of-2^32-bytes": (("layout", "layers", 0, "state"), [{**state, "shape": [1 << 15] * 2}], "more than"),
        "layout-state-of-2^66-bytes": (("layout", "layers", 0, "state"), [{**state, "shape": [1 << 16] * 4}], "more than"),
        "layout-window-of-one": (("layout", "layers", 0, "window"), 1, "window"),
        "layout-window-beyond-every-model": (("layout", "layers", 0, "window"), (1 << 24) + 1, "window"),
        "layout-window-of-full-attention": (("layout", "layers", 1, "window"), 512, "unknown field 'window'"),
        "layout-none-that-keeps": (("layout", "layers", 1, "kind"), "none", "tensors"),
        "layout-kv-without-tensors": (("layout", "layers", 1, "tensors"), [], "tensors"),
        "layout-that-keeps-nothing": (("layout", "layers"), [{"kind": "none", "tensors": []}] * 3, "no layer keeps anything"),
        "layout-v-before-k": (("layout", "layers", 0, "tensors"), layers[0]["tensors"][::-1], "in this order"),
        "layout-k-twice": (("layout", "layers", 0, "tensors"), [layers[0]["tensors"][0]] * 2, "in this order"),
        "layout-k-alone": (("layout", "layers", 0, "tensors"), layers[0]["tensors"][:1], "tensors"),
        "layout-kv-with-an-index": (("layout", "layers", 1, "tensors"), [*pair, index], "tensors"),
        "layout-kv-of-a-key-and-an-index": (("layout", "layers", 1, "tensors"), [pair[0], index], "in this order"),
        "layout-indexed-without-an-index": (("layout", "layers", 1, "kind"), "indexed", "tensors"),
        "layout-index-first": (("layout", "layers", 1), {"kind": "indexed", "tensors": [index, *pair]}, "in this order"),
        "layout-index-of-two-heads": (
            ("layout", "layers", 1),
            {"kind": "indexed", "tensors": [*pair, two_headed]},
            "indexer keys have one head",
        ),
        "layout-zero-heads": (heads, [0, 64], "shape"),
        "layout-4097-heads": (heads, [4097, 64], "heads"),
        "layout-dim-65537": (heads, [2, 65_537], "shape"),
        "layout-three-dimensions": (heads, [2, 64, 1], "shape"),
        "layout-other-layer": (heads, [4096, 65_536], follows),
        "lossy-without-a-certificate": (("precision",), "int8", "'certificate' is missing"),
        "native-with-a-certificate": (("certificate",), None, "unknown field 'certificate'"),
        "precision-unknown": (("precision",), "int9", "precision"),
        "type-block": (("type",), "block", "type"),
        "version-2": (("v",), 2, "v"),
        "created-in-the-far-future": (("created",), (1 << 40) + 1, "created"),
        "label-of-257-characters": (("label",), "x" * 257, "label"),
        "model-name-of-257-characters": (("model_name",), "x" * 257, "model_name"),
    }
    for name, (path, value, says) in changes.items():
        yield Attack(name, write_manifest(edited(header, path, value)), says)
