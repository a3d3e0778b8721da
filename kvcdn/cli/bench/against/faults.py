"""Faults: what is done to an object at rest, to a connection, or to the reader's weights, and what becomes of the answer.

A *wrong* answer is one in which some token is, by the model's own prefill of the same text, at least WRONG_NATS less likely
than the best: rounding, which moves KV between any two right ways of computing it, does not do that. A lossy way is held to
its own answer: what its undamaged KV costs is not the fault's, and is allowed for.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvcdn.cli.bench.against.link import counted_link
from kvcdn.cli.bench.against.stand import Stand
from kvcdn.cli.bench.against.way import Document, Reading, Stored, Way
from kvcdn.cli.rig import QUESTION
from kvcdn.errors import KvcdnError

WRONG_NATS = 0.5
"""A logit of 20 in bfloat16 has steps of 0.125."""

SECTOR_BYTES = 4096

ZEROS = 64
"""So many zero bytes in a row are not KV."""

BIT_FLIPS, SECTORS = 5, 3
"""Trials of these, at other places each; the same relative places in every way."""


class Outcome(enum.StrEnum):
    """What became of an answer."""

    WRONG = "wrong"
    """It was given, and was wrong."""
    UNNOTICED = "unnoticed"
    """The damaged KV, or that of other weights, was used without a word; this time the answer was right all the same."""
    RECOVERED = "recovered"
    """The answer was right: what was lost was fetched again or computed."""
    REFUSED = "refused"
    """An error instead of an answer: whoever asked must prefill."""


@dataclass(frozen=True)
class Trial:
    """One fault, one answer."""

    fault: str
    outcome: Outcome
    said: str


class Judge:
    """Compares answers with what the model says itself. Weights are the stand's, as they are when it is asked."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._known: dict[tuple[str, int, tuple[int, ...]], float] = {}

    def regret(self, document: Document, token_ids: Sequence[int]) -> float:
        """By how many nats the model prefers another token, at the worst token of an answer; 0 for its own greedy answer."""
        model = self._stand.client.model
        key = (document.name, id(model), tuple(token_ids))
        if key not in self._known:
            prompt = self._stand.client.question(document.text, QUESTION).token_ids
            ids = torch.tensor([[*prompt, *token_ids]], device=model.device)
            with torch.inference_mode():
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(token_ids) + 1).logits[0, :-1].float()
            given = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            self._known[key] = float((logits.max(dim=1).values - given).max())
        return self._known[key]


class Faults:
    """The trials of one document and another of the same length."""

    def __init__(self, stand: Stand, document: Document, other: Document, answer_tokens: int) -> None:
        self._stand, self._document, self._other, self._tokens = stand, document, other, answer_tokens
        self._judge = Judge(stand)
        self._allowed, self._reused = 0.0, 0

    def trials(self, way: Way, wire_bytes: int | None) -> Iterator[Trial]:
        """All faults that can happen to `way`; `wire_bytes` is about what a read of the document brings over a socket.

        Raises KvcdnError where the way cannot keep the documents.
        """
        way.keep(self._document)
        way.keep(self._other)
        undamaged = self._read(way)
        if not undamaged.token_ids:
            raise KvcdnError(undamaged.said or "no answer")
        self._allowed = self._judge.regret(self._document, undamaged.token_ids) if way.lossy else 0.0
        self._reused = undamaged.reused
        if way.stored(self._document):
            for fault, damage in self._damages(way):
                yield self._at_rest(way, fault, damage)
        yield self._other_weights(way)
        if way.server is not None and wire_bytes:
            for fault, dies in (("connection cut", False), ("server gone", True)):
                way.renew()
                with counted_link(way.server.port, cut_after=wire_bytes // 2, dies=dies) as link:
                    reading = self._read(way, port=link.port)
                if link.cuts:
                    yield self._trial(fault, reading, transport=True)
                way.renew()

    def _damages(self, way: Way) -> Iterator[tuple[str, Callable[[Sequence[Stored]], None]]]:
        chance = random.Random(0)  # noqa: S311 - the same places in every way
        for _ in range(BIT_FLIPS):
            place, bit = chance.random(), chance.randrange(8)
            yield "bit flip", partial(_flip, place=place, bit=bit)
        for _ in range(SECTORS):
            place, noise = chance.random(), chance.randbytes(SECTOR_BYTES)
            yield "sector lost", partial(_overwrite, place=place, noise=noise)
        yield "truncated", partial(_truncate, size=lambda size: size // 2)
        yield "truncated", partial(_truncate, size=lambda size: size - SECTOR_BYTES)
        yield "wrong object", lambda stored: _exchange(stored, way.stored(self._other))

    def _at_rest(self, way: Way, fault: str, damage: Callable[[Sequence[Stored]], None]) -> Trial:
        stored = self._stored(way)
        before = [(one, one.read()) for one in stored]
        damage(stored)
        way.renew()
        try:
            return self._trial(fault, self._read(way))
        finally:
            way.renew()
            for one, data in before:
                one.write(data)

    def _stored(self, way: Way) -> Sequence[Stored]:
        """What is at rest now: a store that dropped a damaged object gets it again, under another name, from the next read."""
        try:
            return way.stored(self._document)
        except KvcdnError:
            self._read(way)
            way.renew()
            return way.stored(self._document)

    def _other_weights(self, way: Way) -> Trial:
        way.other_weights(self._stand.other_checkpoint())
        try:
            return self._trial("other weights", self._read(way))
        finally:
            way.other_weights(None)

    def _read(self, way: Way, port: int | None = None) -> Reading:
        return way.read(self._document, QUESTION, self._tokens, port=port)

    def _trial(self, fault: str, reading: Reading, *, transport: bool = False) -> Trial:
        if not reading.token_ids:
            return Trial(fault, Outcome.REFUSED, reading.said)
        if self._judge.regret(self._document, reading.token_ids) >= WRONG_NATS + self._allowed:
            return Trial(fault, Outcome.WRONG, reading.said)
        noticed = transport or reading.said or reading.reused < self._reused
        return Trial(fault, Outcome.RECOVERED if noticed else Outcome.UNNOTICED, reading.said)


def _flip(stored: Sequence[Stored], place: float, bit: int) -> None:
    one, data, offset = _at(stored, place)
    data[offset] ^= 1 << bit
    one.write(bytes(data))


def _overwrite(stored: Sequence[Stored], place: float, noise: bytes) -> None:
    one, data, offset = _at(stored, place)
    start = offset // len(noise) * len(noise)
    data[start : start + len(noise)] = noise[: len(data) - start]
    one.write(bytes(data))


def _truncate(stored: Sequence[Stored], size: Callable[[int], int]) -> None:
    one = stored[len(stored) // 2]
    data = one.read()
    one.write(data[: size(len(data))])


def _exchange(stored: Sequence[Stored], others: Sequence[Stored]) -> None:
    for one, other in zip(stored, others, strict=True):
        one.write(other.read())


def _at(stored: Sequence[Stored], place: float) -> tuple[Stored, bytearray, int]:
    """The object, its bytes, and the offset in them, at the share `place` of all bytes, or behind it.

    Holes and padding carry nothing, so that damage to them is none: zeros are passed over.
    """
    objects = [bytearray(one.read()) for one in stored]
    offset = int(place * sum(map(len, objects)))
    chosen = 0
    while offset >= len(objects[chosen]):
        offset -= len(objects[chosen])
        chosen += 1
    data = objects[chosen]
    while not any(data[offset : offset + ZEROS]):
        offset = (offset + ZEROS) % len(data)
    while not data[offset]:
        offset = (offset + 1) % len(data)
    return stored[chosen], data, offset


def other_document(stand: Stand, text: str, tokens: int) -> tuple[Document, Document]:
    """Two documents of `tokens` tokens each: the beginning of `text`, and what follows."""
    encoded = stand.loaded.tokenizer(text, return_offsets_mapping=True, verbose=False)
    middle = encoded["offset_mapping"][tokens - 1][1]
    first, rest = text[:middle], text[middle:]
    end = stand.loaded.tokenizer(rest, return_offsets_mapping=True, verbose=False)["offset_mapping"][tokens - 1][1]
    return Document("first", first, tokens), Document("second", rest[:end], tokens)
