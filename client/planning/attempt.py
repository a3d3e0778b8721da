"""An attempt: one prompt on its way from its tokens to a cache of its longest published prefix, or to a reason why not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from transformers.cache_utils import Cache

from kvcdn.client.loading.fetch import PrefixFetch
from kvcdn.client.loading.local import FetchedPrefix, LocalPrefix, LocalPrefixes, can_hold
from kvcdn.client.loading.match import PublishedPrefix, find_in_precisions
from kvcdn.client.loading.report import MissReason, Report
from kvcdn.client.loading.spans import traceparent
from kvcdn.client.network.tally import Tally
from kvcdn.client.planning.plan import NEAR, SAFE_SHARE, Aim, Mode, seconds
from kvcdn.client.planning.quality import Choice, look_up
from kvcdn.client.planning.race import Race
from kvcdn.client.planning.refine import CoarsePrefix
from kvcdn.client.planning.supply import Supply
from kvcdn.digest import Digest
from kvcdn.errors import KvcdnError, MismatchError
from kvcdn.keys import LOSSY, Chain, ModelIdentity
from kvcdn.model.cache import build_cache
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import layer_devices
from kvcdn.model.speed import prefill_speeds
from kvcdn.model.tokens import Prompt
from kvcdn.trail import Trail, current, following

_LEAST_FAILING_SECONDS = 0.2
"""A lookup is tried again for so long, also where a prefill is short: a connection that broke is no edge that is down."""


class Attempt:
    """Looks one prompt up and starts bringing what is published of it here. `close` when done.

    `length` is how many leading tokens the cache holds, or will hold: at least one is left for the model to read, since
    its logits begin the answer. `report` says where they came from, and why there are not more.
    """

    def __init__(
        self, loaded: LoadedModel, supply: Supply, prompt: Prompt, report: Report, aim: Aim, *, tally: Tally | None = None
    ) -> None:
        """What comes is counted in `tally`."""
        asked = time.perf_counter() - sum(report.seconds.values())
        self.prompt = prompt
        self.report = report
        self._loaded = loaded
        self._aim = aim
        trail = current() or Trail.of(None, traceparent())
        report.request_id = trail.request_id
        with following(trail):
            # One budget of time and retries for the prompt, whatever it asks for.
            session = supply.source.session() if tally is None else supply.source.session(tally=tally)
        self._session = session
        self._supply = supply = replace(supply, source=session)
        self._identity = loaded.identity
        self._fetched: FetchedPrefix | None = None
        self._revoked = supply.gate.revoked.current()
        self._local_identity = loaded.identity
        self._local = self._find_local(aim)
        self._held: LocalPrefix | None = None
        self._kept: Future[bool] | None = None
        self._quality: Choice | None = None
        if self._local is not None and self._local.suffices(self._chain(self._local_identity), prompt.boundaries):
            self._published, self._identity = PublishedPrefix(self._local.blocks), self._local_identity
        else:
            self._published = self._match()
            self._prefer_longer()
        self.length = min(self._published.tokens, len(prompt.token_ids) - 1)
        self.published_tokens = self._published.tokens
        if tally is not None:
            tally.document = self._document()
        if aim.mode is None and self.length > 0:
            self._leave_short_prefix()
        self.race: Race | None = None
        if self.length > 0 and self._local is None:
            try:
                self.race = Race(
                    loaded,
                    self._identity,
                    supply,
                    prompt.token_ids,
                    self._published.blocks,
                    length=self.length,
                    aim=aim,
                    asked=asked,
                    held=self._held,
                )
            except KvcdnError as error:
                self.report.miss(error)
                self._published, self.length = PublishedPrefix(()), 0
        self._explain_short_match()

    @property
    def offered(self) -> int:
        """Tokens that the prompt's document has: up to the first boundary, or, without one, the prompt's whole blocks."""
        layout, tokens = self._loaded.identity.layout, len(self.prompt.token_ids)
        if self.prompt.boundaries:
            end = layout.document_end(min(self.prompt.boundaries))
        else:
            end = layout.usable_blocks(tokens // layout.block_tokens) * layout.block_tokens
        return max(end, self.published_tokens)

    def _document(self) -> Digest | None:
        """The address that the document's manifest has, or would have."""
        return self._chain(self._identity).prefix(self.offered).manifest_address if self.offered else None

    def arrived(self) -> dict[str, int]:
        """What came of blocks, as `kvcdn.accounting.entry.COUNTS` calls it."""
        if self.race is None or self.race.fetch is None:
            return {}
        blocks = self.race.fetch.deliveries
        begun = [one for one in blocks if one.header is not None and not one.held]
        used = blocks[: len(self._published.blocks)] if self.report.tokens_reused else []
        return {
            "blocks_begun": len(begun),
            "tokens_begun": sum(one.name.tokens for one in begun),
            "bytes_used": sum(one.received for one in used if not one.held and not one.computed),
        }

    def _chain(self, identity: ModelIdentity) -> Chain:
        return Chain(identity, self._supply.namespace, self.prompt.token_ids)

    def _find_local(self, aim: Aim) -> LocalPrefix | None:
        """The longest prefix that is here in a precision that is accepted; of equally long ones the exact, then the first."""
        if self._supply.local is None or aim.mode not in (None, Mode.FETCH):
            return None
        started, best = time.perf_counter(), None
        for precision in sorted(self._supply.precisions, key=LOSSY.__contains__):
            identity = replace(self._loaded.identity, precision=precision)
            found = self._look_up(self._supply.local, self._chain(identity))
            if found is not None and (best is None or found.tokens > best.tokens):
                best, self._local_identity = found, identity
        self.report.seconds["local"] = time.perf_counter() - started
        return best

    def _look_up(self, local: LocalPrefixes, chain: Chain) -> LocalPrefix | None:
        devices = layer_devices(self._loaded.model, chain.model.layout)
        try:
            found = local.find(chain, self.prompt.boundaries, self._supply.gate.trust, devices)
            if found is not None:
                self._revoked.require_model(chain.model.tag)
                for block in found.blocks:
                    self._revoked.require_address(block.address)
                for header in found.headers.values():
                    header.require_quality(self._supply.max_kl, f"block {header.address}, kept on this host")
        except KvcdnError as error:
            self.report.local_refused = str(error)
            return None
        return found

    def _prefer_longer(self) -> None:
        """Of what is here and what is published, takes the longer, and what is here for its beginning."""
        if self._local is not None and self._local.tokens >= self._published.tokens:
            self._published, self._identity = PublishedPrefix(self._local.blocks), self._local_identity
        elif self._identity == self._local_identity:
            self._local, self._held = None, self._local
        else:
            self._local = None

    def _leave_short_prefix(self) -> None:
        """Uses no prefix where the model was seen to read the whole prompt sooner than what is behind it."""
        speeds, total = prefill_speeds(self._loaded), len(self.prompt.token_ids)
        behind, whole = speeds.rest(self.length, total), speeds.rest(0, total)
        if not speeds.rests_measured or behind is None or whole is None or whole * NEAR >= behind:
            return
        self.report.reason = MissReason.PLANNED
        self.report.detail = (
            f"here the model reads all {total:,} tokens in {seconds(whole)}, and the {total - self.length:,} behind the"
            f" {self.length:,} published ones in {seconds(behind)}"
        )
        self._local, self._published, self.length = None, PublishedPrefix(()), 0

    def _sooner_anew(self, tokens: int) -> bool:
        """Whether the model reads the whole prompt sooner than what is behind so many tokens, which are fewer than planned."""
        return self._aim.mode is not Mode.FETCH and prefill_speeds(self._loaded).anew(tokens, len(self.prompt.token_ids))

    @property
    def fetch(self) -> PrefixFetch | None:
        """What is fetched, if anything is."""
        return None if self.race is None else self.race.fetch

    def _match(self) -> PublishedPrefix:
        started, supply = time.perf_counter(), self._supply
        whole = prefill_speeds(self._loaded).rest(0, len(self.prompt.token_ids))
        if whole is not None and self._aim.mode is not Mode.FETCH:
            self._session.hurry(max(SAFE_SHARE * whole, _LEAST_FAILING_SECONDS))
        try:
            self._revoked.require_model(self._identity.tag)
            if supply.refiner is not None:
                self._quality = quality = look_up(self._loaded, supply, self.prompt, self._aim.mode)
                self._identity, published = quality.offer.identity, quality.offer.published
            else:
                self._identity, published = find_in_precisions(
                    supply.source, self._identity, supply.precisions, supply.namespace, self.prompt
                )
            return self._without_revoked(published)
        except KvcdnError as error:
            self.report.miss(error)
            return PublishedPrefix(())
        finally:
            self._session.hurry(math.inf)
            self.report.seconds["match"] = time.perf_counter() - started

    def _without_revoked(self, published: PublishedPrefix) -> PublishedPrefix:
        """What comes before the first revoked block; the report tells what does not."""
        count = self._revoked.lead(block.address for block in published.blocks)
        if count == len(published.blocks):
            return published
        self.report.reason = MissReason.REVOKED
        self.report.detail = f"block {published.blocks[count].address} is revoked, and so are those behind it"
        return PublishedPrefix(published.blocks[: self._identity.layout.usable_blocks(count)])

    def _explain_short_match(self) -> None:
        # The first boundary is the end of the document, or of a chat's opening message.
        report, first = self.report, min(self.prompt.boundaries, default=1)
        offered = self._loaded.identity.layout.document_end(first)
        if report.reason is None and self._published.tokens < offered:
            cut = self._session.cut_short
            report.reason = MissReason.ORIGIN_UNAVAILABLE if cut else MissReason.NOT_PUBLISHED
            report.detail = cut or (
                f"only the first {self._published.tokens:,} tokens are published at {self._supply.source.url} for this model"
                if self._published.tokens
                else f"no prefix of this prompt is published at {self._supply.source.url} for this model and namespace"
            )

    def stop_when(self, stopped: Callable[[], bool]) -> None:
        """Once `stopped` says so, whoever waits for the cache gets StoppedError."""
        if self.race is not None:
            self.race.stopped = stopped

    def streaming_cache(self) -> Cache | None:
        """A cache that may still be arriving, handed out when the model had better start; None where there is none.

        Its layers raise the error that ended the fetch, or ReplannedError where waiting is not the fastest way any more;
        `complete_cache` then goes on.
        """
        race = self.race
        if race is None:
            return None
        if race.run(stream=True):
            return self.complete_cache()
        self._fetched = self._to_keep(race)
        return build_cache(self._loaded.model, race.layers)

    def complete_cache(self) -> Cache | None:
        """The whole cache, or what there will be of it, or None; records in the report which, and why."""
        race = self.race
        if self._local is not None and self.length:
            self.record()
            return build_cache(self._loaded.model, self._local.layers)
        if race is None:
            return None
        try:
            race.run(stream=False)
        except KvcdnError as error:
            # The model does not compute what its files say: then what is published is not for it, either.
            self.close()
            self.report.miss(error)
            self.length = 0
            return None
        except BaseException:
            self.close()
            raise
        usable = race.blocks_usable
        if self._held is not None and usable < len(self._held.blocks):
            return self._held_alone(race, self._held)
        if 0 < usable < len(self._published.blocks) and self._sooner_anew(self._published.blocks[usable - 1].end):
            race.drop()
            usable = 0
        self._published = PublishedPrefix(self._published.blocks[:usable])
        self.length = min(self._published.tokens, self.length)
        self.record()
        if not self.length:
            return None
        for layer in race.layers:
            layer.declare(self.length)
        self._fetched = self._to_keep(race)
        return build_cache(self._loaded.model, race.layers)

    def _held_alone(self, race: Race, held: LocalPrefix) -> Cache | None:
        """The cache of what is here, where the rest is not to be fetched."""
        race.close()
        if race.error is not None:
            self.report.miss(race.error)
        elif race.planned:
            self.report.reason, self.report.detail = MissReason.PLANNED, race.planned
        self.report.plan, self.report.bytes_fetched = race.history.to_json(), race.bytes_fetched
        self.race, self._held = None, None
        if self._sooner_anew(held.length):
            self._published, self.length = PublishedPrefix(()), 0
            return None
        self._local = held
        self._published, self.length = PublishedPrefix(held.blocks), held.length
        return self.complete_cache()

    def record(self) -> None:
        """Writes what was mapped, or what came of the race, into the report."""
        race, report = self.race, self.report
        if race is not None:
            self._record_race(race)
        elif self._local is not None:
            report.tokens_local = report.tokens_reused = self.length
            report.blocks_reused = len(self._published.blocks)
        else:
            return
        report.precision = self._identity.precision
        report.tokens_coarse = report.tokens_reused if report.precision in LOSSY else 0
        if self._quality is not None and race is not None:
            report.plan["quality"] = self._quality.to_json()
        report.bytes_raw = self._loaded.identity.layout.needed_bytes(self.length)
        avoided = prefill_speeds(self._loaded).remaining(0, self.length, len(self.prompt.token_ids))
        if avoided is not None:
            spent = sum(report.seconds.get(stage, 0.0) for stage in ("local", "match"))
            report.seconds_saved = avoided - spent - (race.spent_s if race is not None else 0.0)

    def _record_race(self, race: Race) -> None:
        report = self.report
        race.close()
        if race.error is not None:
            report.miss(race.error)
        elif report.reason is None and race.planned:
            report.reason, report.detail = MissReason.PLANNED, race.planned
        here = [self._published.blocks[index] for index in race.computed]
        report.tokens_computed = sum(min(name.end, self.length) - name.start for name in here)
        report.tokens_reused = self.length - report.tokens_computed
        report.blocks_reused = len(self._published.blocks) - len(here)
        kept = [self._published.blocks[index] for index in race.held]
        report.tokens_local = sum(min(name.end, self.length) - name.start for name in kept)
        report.bytes_fetched = race.bytes_fetched
        report.seconds["fetch"] = race.history.fetching_s
        report.plan = race.history.to_json()

    def _to_keep(self, race: Race) -> FetchedPrefix | None:
        """What this host may keep, taken down before the model writes behind it: what is fetched whole."""
        if self._supply.local is None or race.fetch is None or not can_hold(self._identity):
            return None
        # Where the prompt ends with a block, the model reads its last token itself, and writes over the row.
        blocks = tuple(name for name in self._published.blocks if name.end <= self.length)
        return FetchedPrefix.of(race.fetch, self._identity, blocks, self._supply.gate.trust)

    def keep(self, *, behind: bool = False) -> None:
        """Has what was fetched whole kept for others on this host, `behind` a model that is about to run.

        What was computed here nobody has signed.
        """
        fetched, self._fetched = self._fetched, None
        if self._supply.local is not None and fetched is not None and self.race is not None and not self.race.computed:
            self._kept = self._supply.local.keep(fetched, behind=behind)

    def refine(self) -> None:
        """Has what was lossy of the cache made exact for later prompts, where the client is progressive."""
        refiner, blocks = self._supply.refiner, self._published.blocks
        if refiner is not None and self.report.tokens_coarse and blocks:
            coarse = CoarsePrefix(self._identity, self.prompt.token_ids, blocks, self._kept)
            refiner.begin(coarse, self._supply, self.report)

    def prove(self) -> None:
        """Has what was fetched pass the gate once all of it is here, and every header known. Raises MismatchError."""
        fetch = self.fetch
        if fetch is not None and fetch.headers:
            self._supply.gate.admit(fetch.layers, fetch.headers, self.prompt.token_ids, self.length, self.report, audit=False)

    def admitted_cache(self, *, audit: bool) -> Cache | None:
        """As `complete_cache`, once it has passed the gate; None where it does not, and the report says why."""
        cache, loaded, report = self.complete_cache(), self._local or self.fetch, self.report
        if cache is None or loaded is None:
            return None
        try:
            self._supply.gate.admit(loaded.layers, loaded.headers, self.prompt.token_ids, self.length, report, audit=audit)
        except MismatchError as error:
            report.miss(error)
            self.length = report.tokens_reused = report.tokens_computed = report.tokens_local = report.tokens_coarse = 0
            report.blocks_reused = report.bytes_raw = 0
            report.seconds_saved = None
            return None
        self.keep(behind=True)
        return cache

    def close(self) -> None:
        """Stops what is still on its way."""
        if self.race is not None:
            self.race.close()
