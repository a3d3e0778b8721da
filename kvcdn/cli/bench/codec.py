"""Codecs, measured: what `kvcdn bench codec` reports of size, speed and quality on real documents."""

from __future__ import annotations

import argparse
import inspect
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blosc2
import torch

from kvcdn.block import open_header, open_segment, seal_block
from kvcdn.certificate import MICRO, NANO, Certificate
from kvcdn.cli.bench.machine import spread
from kvcdn.cli.options import quiet_libraries
from kvcdn.cli.rig import document_text
from kvcdn.codec import Encoded
from kvcdn.codecs.compiled import wait_until_compiled
from kvcdn.digest import Buffer
from kvcdn.errors import UsageError
from kvcdn.keys import LOSSY, PRECISION_NATIVE, TRANSFORMED, BlockName, Namespace, PrefixNames
from kvcdn.model.layers import TORCH_DTYPES
from kvcdn.model.load import LoadedModel, load_model
from kvcdn.model.memory import empty_tensors
from kvcdn.model.prefill import ScheduledPrefill, tensor_bytes
from kvcdn.model.quality import CONTINUATION_TOKENS, Judge, Kv
from kvcdn.origin.publishing.lossy import Encoders
from kvcdn.seal import ObjectKeys
from kvcdn.signing import SigningKey

PUBLISHED = [
    {"codec": "CacheGen", "published": "arXiv 2310.07240, abstract: 3.5 to 4.3 times smaller than what it compares with"},
    {"codec": "KVTC", "published": "arXiv 2511.01815, abstract: up to 20 times smaller"},
]
"""Figures of others, as they published them, on their models and in their measures; not measured here."""

_NO_CERTIFICATE = Certificate(0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class _Subject:
    """A document's exact KV, and what judges others by it: tokens that follow the document, of which no encoder knows."""

    name: str
    loaded: LoadedModel
    ids: tuple[int, ...]
    """Of the document."""
    exact: Kv
    """Of the document."""
    behind: Kv
    """Of the tokens that follow it."""
    judge: Judge
    encoders: Encoders

    @property
    def raw_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.exact for tensor in layer)


def measure_codecs(
    model: str, documents: Sequence[Path], tokens: int, runs: int, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each document and codec: sizes over raw KV, GB of raw KV a second, divergences in nats.

    `decode_gbps_per_core` is hash, decryption and decoding of one block, of which `spread_gbps` has the `runs`, by processor
    time: that of one thread, whatever else runs.
    """
    quiet_libraries()
    loaded = load_model(model)
    for name, text in _texts(documents):
        ids = tuple(loaded.tokenizer(text[: 16 * (tokens + CONTINUATION_TOKENS)])["input_ids"][: tokens + CONTINUATION_TOKENS])
        if len(ids) < tokens + CONTINUATION_TOKENS:
            raise UsageError(f"{name} has {len(ids)} tokens; {tokens + CONTINUATION_TOKENS} are needed")
        tell(f"{name}: prefilling {len(ids):,} tokens, and again in shorter passes")
        prefill = ScheduledPrefill(loaded.model, loaded.identity.layout, len(ids))
        for _ in prefill.run(ids):
            pass
        whole, document = prefill.rows(len(ids)), ids[:tokens]
        judge = Judge(loaded, ids, whole, continuation=CONTINUATION_TOKENS)
        exact, behind = (
            [tuple(tensor[rows] for tensor in layer) for layer in whole] for rows in (slice(tokens), slice(tokens, None))
        )
        subject = _Subject(name, loaded, document, exact, behind, judge, Encoders(loaded, document, exact))
        yield from _simple_rows(subject)
        for precision in (PRECISION_NATIVE, *LOSSY):
            tell(f"{name}: {precision}")
            yield _row(subject, precision, runs)


def _texts(documents: Sequence[Path]) -> Iterator[tuple[str, str]]:
    if documents:
        for document in documents:
            yield document.name, document_text(document)
        return
    yield "text", document_text(None)
    yield "code", inspect.getsource(argparse)
    yield "table", _character_table()


def _character_table() -> str:
    """A table of real data that is on every machine: Unicode's characters and their properties."""
    rows = ["code,name,category,bidirectional,decimal,mirrored"]
    for code in range(0x20, 0x1000):
        character = chr(code)
        if name := unicodedata.name(character, ""):
            decimal = unicodedata.decimal(character, "")
            properties = (unicodedata.category(character), unicodedata.bidirectional(character), decimal)
            rows.append(f"U+{code:04X},{name},{','.join(map(str, properties))},{unicodedata.mirrored(character)}")
    return "\n".join(rows)


def _simple_rows(subject: _Subject) -> Iterator[dict[str, Any]]:
    """What others do without a codec of their own: as it is, zstd over it, and 8 bits over whole tensors."""
    yield {"document": subject.name, "codec": "safetensors (raw)", "ratio": 1.0}
    stored = 0
    for layer in subject.exact:
        for tensor in layer:
            raw = bytes(tensor_bytes(tensor.contiguous()))
            stored += len(blosc2.compress2(raw, typesize=1, codec=blosc2.Codec.ZSTD, clevel=5, filters=[], nthreads=1))
    yield {"document": subject.name, "codec": "zstd over raw bytes", "ratio": round(stored / subject.raw_bytes, 4)}
    uniform = [tuple(_uniform(tensor) for tensor in layer) for layer in subject.exact]
    halved = sum(tensor.numel() for layer in subject.exact for tensor in layer) / subject.raw_bytes
    yield {"document": subject.name, "codec": "int8 over whole tensors", "ratio": halved, **_quality(subject, uniform)}


def _uniform(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.float()
    step = values.abs().max().clamp_min(1e-12) / 127
    return ((values / step).round() * step).to(tensor.dtype)


def _quality(subject: _Subject, kv: Kv) -> dict[str, Any]:
    pairs = zip(kv, subject.behind, strict=True)
    found = subject.judge.certify([tuple(torch.cat(both) for both in zip(*layers, strict=True)) for layers in pairs])
    return {
        "kl": found.kl_mean / NANO,
        "kl_recompute": found.kl_recompute / NANO,
        "kl_p99": found.kl_p99 / NANO,
        "top1": found.top1 / MICRO,
        "greedy_equal": found.greedy_equal,
        "greedy_total": found.greedy_total,
    }


def _row(subject: _Subject, precision: str, runs: int) -> dict[str, Any]:
    layout = subject.loaded.identity.layout
    identity = replace(subject.loaded.identity, precision=precision)
    names = PrefixNames.of(identity, Namespace.public(), subject.ids)
    encoder = None if precision == PRECISION_NATIVE else subject.encoders.of(precision)
    basis = encoder.basis if encoder else None
    certificate = None if encoder is None else _NO_CERTIFICATE
    decoded = [tuple(torch.empty_like(tensor) for tensor in layer) for layer in subject.exact]
    key, stored, seconds, blocks = SigningKey.generate(), 0, 0.0, []

    def seal(name: BlockName) -> tuple[list[list[Buffer | Encoded]], bytes]:
        raw = [[tensor_bytes(tensor[name.start : name.end]) for tensor in layer] for layer in subject.exact]
        layers: list[list[Buffer | Encoded]] = [
            [encoder.encode(data, index, place, name) if encoder else data for place, data in enumerate(tensors)]
            for index, tensors in enumerate(raw)
        ]
        return layers, b"".join(seal_block(identity, name, subject.loaded.producer, layers, key, certificate, basis))

    whole = subject.encoders.basis if precision in TRANSFORMED else None
    parts: Sequence[Sequence[Any]] = whole.tensors if whole else [()] * len(layout.layers)
    # The first time finds no compiled loops, and asks for them.
    _decode_speed(seal(names.blocks[0])[1], names.blocks[0], parts)
    wait_until_compiled()
    for name in names.blocks:
        started = time.process_time()
        layers, block = seal(name)
        seconds += time.process_time() - started
        stored += len(block)
        blocks.append(block)
        for ours, made in zip(decoded, layers, strict=True):
            for tensor, data in zip(ours, made, strict=True):
                rows = tensor_bytes(tensor[name.start : name.end])
                rows[:] = data.decoded if isinstance(data, Encoded) else data
    speeds = spread([_decode_speed(blocks[0], names.blocks[0], parts) for _ in range(runs)])
    row = {
        "document": subject.name,
        "codec": "lossless" if precision == PRECISION_NATIVE else precision,
        "ratio": round(stored / subject.raw_bytes, 4),
        "encode_gbps": round(subject.raw_bytes / seconds / 1e9, 4),
        "decode_gbps_per_core": speeds["median"],
        "spread_gbps": speeds,
        "threads": 1,
        **_quality(subject, decoded),
    }
    return row if whole is None else {**row, "basis_bytes": whole.name.size}


def _decode_speed(block: bytes, name: BlockName, basis: Sequence[Sequence[Any]]) -> float:
    """GB of raw KV a second of this thread's processor time: every segment of a block verified, decrypted and decoded in it.

    Into memory such as a client's caches have: what an earlier prompt had, where there was one. The time is not the process's:
    workers of the libraries that encoded turn in circles for a tenth of a second before they sleep.
    """
    header, scratch = open_header(block, "block"), bytearray()
    keys = ObjectKeys(name.content_key, header.salt)
    layers = [
        empty_tensors([(part.shape, TORCH_DTYPES[part.dtype]) for part in segment.parts], torch.device("cpu"))
        for segment in header.segments
    ]
    outs = [[tensor_bytes(tensor) for tensor in tensors] for tensors in layers]
    started = time.thread_time()
    for segment, places in zip(header.segments, outs, strict=True):
        begin = header.envelope_bytes + segment.offset
        stored = memoryview(block)[begin : begin + segment.length]
        open_segment(header, keys, segment.layer, stored, scratch, places, basis[segment.layer])
    return header.raw_bytes / (time.thread_time() - started) / 1e9
