"""Verification: that what is loaded is what was published, and how it relates to what this machine computes itself.

Three different questions, never mixed: are the loaded tensors the published ones (signature, hash, AEAD, and a keyed
digest of the raw tensors); does a local prefill on the publisher's schedule give the same bits (on the same processor and
software it does; on others, whose names anybody may claim, it must be the same but for rounding, which is measured block by
block); and how far is both from one pass over the whole text (as far as any two kernels are). Of a lossy precision the
second cannot be asked: its certificate is measured again instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvcdn.client.client import Client
from kvcdn.client.loading.fetch import PrefixFetch
from kvcdn.client.loading.match import PublishedPrefix, find_in_precisions
from kvcdn.client.loading.report import Audited
from kvcdn.client.trust.audit import audit_block, auditable, choose_blocks, find_culprit
from kvcdn.errors import NotFoundError
from kvcdn.keys import BlockName
from kvcdn.model.cache import GROWTH_TOKENS, beside, build_cache, output_cache
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import device_of, layer_devices
from kvcdn.model.prefill import ScheduledPrefill, tensor_bytes
from kvcdn.model.quality import Judge
from kvcdn.model.speed import remember_prefill
from kvcdn.model.tokens import Prompt
from kvcdn.seal import ObjectKeys

_TOLERANCE = 2
"""A lossy KV is sound up to this many times the divergence that its publisher measured: another stack rounds otherwise."""


@dataclass(frozen=True)
class Difference:
    """The loaded cache against one pass over the whole text, over `greedy_total` continued tokens (teacher-forced).

    `kl_mean` is the mean KL(one pass || loaded) of the next-token distributions, in nats; `top1` the share of positions
    with the same most likely token; `greedy_equal` how many greedy tokens from the first on are equal.
    """

    max_abs_dlogit: float
    kl_mean: float
    top1: float
    greedy_equal: int
    greedy_total: int


@dataclass(frozen=True)
class Verification:
    """The answers, for the first `tokens` tokens of the document.

    In a lossy precision there are two certificates, that of the last block and the same measured here.
    """

    precision: str
    tokens: int
    blocks: int
    loaded_equals_published: bool
    same_stack: bool
    bit_identical: bool
    first_difference: str
    beyond_rounding: str
    """The first block that is not what this model computes, even on another stack; empty where none was found."""
    producer: dict[str, Any]
    prefill_seconds: float
    one_pass: Difference
    certificate: dict[str, int] | None
    measured: dict[str, int] | None

    @property
    def sound(self) -> bool:
        """False where something is wrong, and not merely computed elsewhere."""
        if self.certificate is not None and self.measured is not None:
            noise = max(self.certificate["kl_mean"], self.certificate["kl_recompute"], self.measured["kl_recompute"])
            return self.loaded_equals_published and self.measured["kl_mean"] <= _TOLERANCE * noise
        alike = self.bit_identical or (not self.same_stack and not self.beyond_rounding)
        return self.loaded_equals_published and alike

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}


@dataclass(frozen=True)
class AuditedPrefix:
    """What random blocks of the first `tokens` tokens of a document came to: `audited`, of so many `blocks`.

    `culprit` is the first wrong block, which may have led others astray.
    """

    tokens: int
    blocks: int
    audited: tuple[Audited, ...]
    culprit: Audited | None

    @property
    def sound(self) -> bool:
        """False where a block is not what this model computes from the blocks before it."""
        return all(one.passed for one in self.audited)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}


def audit_prefix(
    client: Client, token_ids: tuple[int, ...], count: int, progress: Callable[[str], None] = lambda _: None
) -> AuditedPrefix:
    """Loads the published cache of `token_ids` and recomputes `count` random blocks of it, each from those before it.

    Distrusts nobody: that is for who knows that the model in memory is what its files say. Raises as `verify_prefix`.
    """
    loaded, published, fetch = _load_whole(client, token_ids, 0, progress)
    results = []
    for header in choose_blocks(auditable(loaded, fetch.layers, fetch.headers), count):
        progress(f"recomputing tokens {header.start:,} to {header.start + header.tokens:,}")
        results.append(audit_block(loaded, fetch.layers, header, token_ids))
    failed = next((one for one in results if not one.passed), None)
    # Every row is here, so that every block can be cleared or named.
    culprit = None if failed is None else find_culprit(loaded, fetch.layers, fetch.headers, token_ids, failed)
    return AuditedPrefix(published.tokens, len(published.blocks), tuple(results), culprit)


def verify_prefix(
    client: Client, token_ids: tuple[int, ...], greedy: int = 32, progress: Callable[[str], None] = lambda _: None
) -> Verification:
    """Loads the published cache of `token_ids`, recomputes it and compares.

    Raises NotFoundError where none is published, and whatever error loading ends in: here a failure is not a miss.
    """
    loaded, published, fetch = _load_whole(client, token_ids, greedy, progress)
    tokens = published.tokens
    equal = all(_as_published(fetch, name) for name in published.blocks)
    progress(f"prefilling {tokens:,} tokens on the publisher's schedule")
    started = time.perf_counter()
    prefill = ScheduledPrefill(loaded.model, loaded.identity.layout, tokens)
    difference = _first_difference(loaded, prefill, fetch, published.blocks, token_ids[:tokens])
    seconds = time.perf_counter() - started
    remember_prefill(loaded, tokens, seconds)
    last = fetch.headers[published.blocks[-1].index]
    measured = None
    if last.certificate is not None:
        progress(f"measuring the certificate of {last.precision} again")
        held = [layer.rows(0, tokens) for layer in fetch.layers]
        measured = Judge(loaded, token_ids[:tokens], prefill.rows(tokens)).certify(held)
    same_stack = all(header.producer == loaded.producer for header in fetch.headers.values())
    wrong = None
    if difference and not same_stack and last.certificate is None:
        progress("comparing each block with what is computed here, rounding allowed for")
        wrong = _first_wrong(loaded, fetch, token_ids)
    progress(f"prefilling {tokens:,} tokens in one pass")
    producer = fetch.headers[0].producer
    return Verification(
        precision=last.precision,
        tokens=tokens,
        blocks=len(published.blocks),
        loaded_equals_published=equal,
        same_stack=same_stack,
        bit_identical=not difference,
        first_difference=difference,
        beyond_rounding="" if wrong is None else wrong.detail,
        producer=producer.to_json(),
        prefill_seconds=round(seconds, 3),
        one_pass=_against_one_pass(loaded, fetch, token_ids, tokens, greedy),
        certificate=last.certificate.to_json() if last.certificate else None,
        measured=measured.to_json() if measured else None,
    )


def _load_whole(
    client: Client, token_ids: tuple[int, ...], beyond: int, progress: Callable[[str], None]
) -> tuple[LoadedModel, PublishedPrefix, PrefixFetch]:
    """Loads every row of what is published of `token_ids`, with room for `beyond` more tokens."""
    loaded = client.current()
    identity, published = find_in_precisions(
        client.source, loaded.identity, client.precisions, client.namespace, Prompt(token_ids, (len(token_ids),))
    )
    if not published.blocks:
        raise NotFoundError(
            f"nothing of this document is published at {client.source.url} for {loaded.identity.name} in this namespace",
            hint="publish it first, and ask for the same --model, --namespace and --chat",
        )
    progress(f"loading {published.tokens:,} tokens")
    fetch = PrefixFetch(
        client.source,
        identity,
        published.blocks,
        length=published.tokens,
        capacity=published.tokens + beyond + GROWTH_TOKENS,
        devices=layer_devices(loaded.model, identity.layout),
        trust=client.trust,
        whole=True,
        max_kl=client.max_kl,
    )
    fetch.wait()
    return loaded, published, fetch


def _as_published(fetch: PrefixFetch, name: BlockName) -> bool:
    header = fetch.headers[name.index]
    keys = ObjectKeys(name.content_key, header.salt)
    for segment in header.segments:
        places = fetch.deliveries[name.index].places(segment.layer)
        if keys.raw_digest(*(tensor_bytes(place.cpu()) for place in places)) != segment.raw_digest:
            return False
    return True


def _first_difference(
    loaded: LoadedModel, prefill: ScheduledPrefill, fetch: PrefixFetch, blocks: Sequence[BlockName], token_ids: tuple[int, ...]
) -> str:
    """Where a local prefill on the schedule first differs from the loaded tensors; empty where it is the same to the bit."""
    first = ""
    for name, block in zip(blocks, prefill.run(token_ids), strict=True):
        for index, tensors in enumerate(block.layers):
            parts = loaded.identity.layout.layers[index].parts(checkpoint=True)
            pairs = zip(tensors, fetch.deliveries[name.index].places(index), strict=True)
            for part, (ours, theirs) in zip(parts, pairs, strict=False):
                if not first and tensor_bytes(ours) != tensor_bytes(theirs.cpu()):
                    first = f"tokens {block.start} to {block.end}, layer {index}, {part.name}"
    return first


def _first_wrong(loaded: LoadedModel, fetch: PrefixFetch, token_ids: tuple[int, ...]) -> Audited | None:
    """The first block that differs by more than rounding from what is computed behind those before it."""
    audited = (audit_block(loaded, fetch.layers, one, token_ids) for one in auditable(loaded, fetch.layers, fetch.headers))
    return next((one for one in audited if not one.passed), None)


def _against_one_pass(
    loaded: LoadedModel, fetch: PrefixFetch, token_ids: tuple[int, ...], tokens: int, greedy: int
) -> Difference:
    """Continues greedily from one pass over the published `tokens`, and forces the loaded cache along the same tokens."""
    model = loaded.model
    with torch.inference_mode():
        # A token is read by both, so that both have logits for what follows it: the last published one again, or, as states
        # cannot be taken back, the document's next, of which at least one is never published.
        held = tokens if loaded.identity.layout.state_bytes else tokens - 1
        ids = torch.tensor([token_ids[: held + 1]], dtype=torch.long, device=device_of(model))
        body = getattr(model, model.base_model_prefix, model)
        head = output_cache(body(input_ids=ids[:, :-1], use_cache=True)) if held else None
        for layer in fetch.layers:
            layer.declare(held)
        caches = [DynamicCache(config=model.config) if head is None else head, build_cache(model, fetch.layers)]
        token = ids[:, -1:]
        differences, divergences, equal = [], [], []
        for _ in range(greedy):
            outputs = [model(input_ids=token, use_cache=True, **beside(model.forward, cache, token)) for cache in caches]
            reference, ours = (output.logits[0, -1].float() for output in outputs)
            differences.append(float((reference - ours).abs().max()))
            log_p, log_q = reference.log_softmax(-1), ours.log_softmax(-1)
            divergences.append(float((log_p.exp() * (log_p - log_q)).sum()))
            equal.append(bool(reference.argmax() == ours.argmax()))
            token = reference.argmax().view(1, 1)
    leading = next((index for index, same in enumerate(equal) if not same), len(equal))
    return Difference(max(differences), sum(divergences) / greedy, sum(equal) / greedy, leading, greedy)
