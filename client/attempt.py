"""An attempt: one prompt on its way from its tokens to a cache of its longest published prefix, or to a reason why not."""

from __future__ import annotations

import time
from dataclasses import dataclass

from transformers.cache_utils import Cache

from kvcdn.client.fetch import PrefixFetch
from kvcdn.client.gate import Gate
from kvcdn.client.local import FetchedPrefix, LocalPrefix, LocalPrefixes
from kvcdn.client.match import PublishedPrefix, find_in_precisions
from kvcdn.client.report import MissReason, Report
from kvcdn.client.transport import Source
from kvcdn.errors import KvcdnError, MismatchError
from kvcdn.keys import PRECISION_NATIVE, Chain, Namespace
from kvcdn.model.cache import GROWTH_TOKENS, build_cache
from kvcdn.model.load import LoadedModel
from kvcdn.model.speed import prefill_speed
from kvcdn.model.tokens import Prompt


@dataclass(frozen=True)
class Supply:
    """Where caches come from, and what they pass before their use: what all prompts of a client share."""

    source: Source
    gate: Gate
    namespace: Namespace
    precisions: tuple[str, ...]
    max_kl: float | None
    local: LocalPrefixes | None = None


class Attempt:
    """Looks one prompt up and starts fetching what is published of it. `close` when done.

    `length` is how many leading tokens the cache holds, or will hold: at least one is left for the model to read, since
    its logits begin the answer. `report` says where they came from, and why there are not more.
    """

    def __init__(self, loaded: LoadedModel, supply: Supply, prompt: Prompt, report: Report) -> None:
        self.prompt = prompt
        self.report = report
        self._loaded = loaded
        self._supply = supply
        self._source = supply.source.session()
        self._fetched: FetchedPrefix | None = None
        self._identity = loaded.identity
        chain = Chain(loaded.identity, supply.namespace, prompt.token_ids)
        self._local = self._find_local(chain)
        if self._local is not None and self._local.suffices(chain, prompt.boundaries):
            self._published = PublishedPrefix(self._local.blocks)
        else:
            self._published = self._match()
            self._prefer_longer()
        self.length = min(self._published.tokens, len(prompt.token_ids) - 1)
        self.fetch: PrefixFetch | None = self._start_fetch() if self.length > 0 and self._local is None else None
        self._explain_short_match()

    def _find_local(self, chain: Chain) -> LocalPrefix | None:
        # What is kept is exact: it is better than any lossy form, and taken by whoever takes exact KV at all.
        if self._supply.local is None or PRECISION_NATIVE not in self._supply.precisions:
            return None
        started, trust = time.perf_counter(), self._supply.gate.trust
        try:
            return self._supply.local.find(chain, self.prompt.boundaries, trust, self._loaded.model.device)
        except KvcdnError as error:
            self.report.local_refused = str(error)
            return None
        finally:
            self.report.seconds["local"] = time.perf_counter() - started

    def _prefer_longer(self) -> None:
        """Of what is here and what is published, takes the longer; where they are equally long, what is here."""
        if self._local is not None and self._local.tokens >= self._published.tokens:
            self._published, self._identity = PublishedPrefix(self._local.blocks), self._loaded.identity
        else:
            self._local = None

    def _match(self) -> PublishedPrefix:
        started = time.perf_counter()
        supply = self._supply
        try:
            self._identity, published = find_in_precisions(
                self._source, self._identity, supply.precisions, supply.namespace, self.prompt
            )
            return published
        except KvcdnError as error:
            self.report.miss(error)
            return PublishedPrefix(())
        finally:
            self.report.seconds["match"] = time.perf_counter() - started

    def _start_fetch(self) -> PrefixFetch:
        fetch = PrefixFetch(
            self._source,
            self._identity,
            self._published.blocks,
            length=self.length,
            capacity=len(self.prompt.token_ids) + GROWTH_TOKENS,
            device=self._loaded.model.device,
            trust=self._supply.gate.trust,
            max_kl=self._supply.max_kl,
        )
        if self._supply.local is not None and self._identity.precision == PRECISION_NATIVE:
            # Where the prompt ends with a block, the model reads its last token itself, and writes over the row.
            blocks = tuple(name for name in self._published.blocks if name.end <= self.length)
            self._fetched = FetchedPrefix.of(fetch, self._loaded.identity, blocks, self._supply.gate.trust)
        return fetch

    def _explain_short_match(self) -> None:
        # The first boundary is the end of the document, or of a chat's opening message.
        report, offered = self.report, min(self.prompt.boundaries, default=1)
        if report.reason is None and self._published.tokens < offered:
            report.reason = MissReason.NOT_PUBLISHED
            report.detail = (
                f"only the first {self._published.tokens:,} tokens are published at {self._supply.source.url} for this model"
                if self._published.tokens
                else f"no prefix of this prompt is published at {self._supply.source.url} for this model and namespace"
            )

    def streaming_cache(self) -> Cache | None:
        """A cache that may still be arriving, handed out when the model had better start; None where nothing is published.

        Its layers, and this call, raise the error that ended the fetch; `complete_cache` then has what is left.
        """
        if self.fetch is None:
            return None
        self.fetch.wait_until_overlap_pays()
        return build_cache(self._loaded.model, self.fetch.layers)

    def complete_cache(self) -> Cache | None:
        """The whole cache, or what arrived of it, or None; records in the report which, and why."""
        fetch = self.fetch
        if self._local is not None and self.length:
            self.record()
            return build_cache(self._loaded.model, self._local.layers)
        if fetch is None:
            return None
        try:
            fetch.wait()
        except KvcdnError as error:
            self._fetched = None
            self.report.miss(error)
            usable = fetch.salvage()
            self._published = PublishedPrefix(self._published.blocks[:usable])
            self.length = min(self._published.tokens, self.length)
        self.record()
        if not self.length:
            return None
        for layer in fetch.layers:
            layer.declare(self.length)
        return build_cache(self._loaded.model, fetch.layers)

    def record(self) -> None:
        """Writes what was mapped, or what the fetch delivered, into the report."""
        fetch, report = self.fetch, self.report
        if fetch is not None:
            fetch.close()
            report.bytes_fetched = fetch.bytes_fetched
            report.seconds["fetch"] = fetch.seconds
        elif self._local is not None:
            report.tokens_local = self.length
        else:
            return
        report.tokens_reused = self.length
        report.precision = self._identity.precision
        report.blocks_reused = len(self._published.blocks)
        report.bytes_raw = self._loaded.identity.layout.needed_bytes(self.length)
        speed = prefill_speed(self._loaded)
        if speed:
            spent = sum(report.seconds.get(stage, 0.0) for stage in ("local", "match", "fetch"))
            report.seconds_saved = self.length / speed - spent

    def keep(self) -> None:
        """Has what was fetched whole kept for others on this host."""
        if self._supply.local is not None and self._fetched is not None:
            self._supply.local.keep(self._fetched)
            self._fetched = None

    def vouched_for(self) -> bool:
        """Whether the publishers of what is fetched, as far as known by now, have passed the canary before.

        Returns when the first layer is here. Raises the error that ended the fetch.
        """
        if self.fetch is None:
            return True
        self.fetch.wait_layer(0)
        return self._supply.gate.open_for({header.publisher for header in self.fetch.headers.values()})

    def admitted_cache(self, *, audit: bool) -> Cache | None:
        """As `complete_cache`, once it has passed the gate; None where it does not, and the report says why."""
        cache, loaded, report = self.complete_cache(), self._local or self.fetch, self.report
        if cache is None or loaded is None:
            return None
        try:
            self._supply.gate.admit(loaded.layers, loaded.headers, self.prompt.token_ids, self.length, report, audit=audit)
        except MismatchError as error:
            report.miss(error)
            self.length = report.tokens_reused = report.tokens_local = report.blocks_reused = report.bytes_raw = 0
            report.seconds_saved = None
            return None
        self.keep()
        return cache

    def close(self) -> None:
        """Stops what is still on its way."""
        if self.fetch is not None:
            self.fetch.close()
