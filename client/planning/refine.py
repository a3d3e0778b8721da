"""Refining: what a prompt began with in a lossy precision is made exact behind its answer, for those that follow.

The exact prefix goes to the host's local store, as anything that is fetched: every process finds it there, checked, and what is
coarse cannot pass for it. One prefix after another, in a thread of its own; whatever ends it, the coarse one serves as before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Self

from kvcdn.client.loading.coarse import CoarseRows
from kvcdn.client.loading.fetch import PrefixFetch
from kvcdn.client.loading.local import FetchedPrefix, LocalPrefixes
from kvcdn.client.loading.report import Refining, Report
from kvcdn.client.planning.supply import Supply
from kvcdn.digest import Digest
from kvcdn.errors import CorruptError, KvcdnError, NotFoundError, UnavailableError, UsageError
from kvcdn.keys import PRECISION_NATIVE, BlockName, Chain, ModelIdentity, refinement_of
from kvcdn.model.place import all_on

MAX_WAITING = 4
"""Prefixes that wait to be refined; others are refined when they are used again."""


@dataclass(frozen=True)
class CoarsePrefix:
    """What a prompt began with: `blocks` of a lossy precision lead `token_ids`. `kept` says when the local store has them."""

    model: ModelIdentity
    token_ids: Sequence[int]
    blocks: tuple[BlockName, ...]
    kept: Future[bool] | None = None

    @property
    def end(self) -> int:
        return self.blocks[-1].end


class Refiner:
    """Refines for the clients of one process. Thread-safe."""

    def __init__(self, local: LocalPrefixes) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: dict[Digest, tuple[Future[None], list[Report]]] = {}
        self._closed = threading.Event()

    @classmethod
    def of(cls, local: LocalPrefixes | None) -> Self:
        """Of a client with this local store. Raises UsageError where it has none."""
        if local is None:
            raise UsageError("there is no local store to bring exact KV to", hint="give local_store, or leave progressive out")
        return cls(local)

    def begin(self, coarse: CoarsePrefix, supply: Supply, report: Report) -> None:
        """Has `coarse` refined from `supply`; `report` says what becomes of it. Prefixes under way are not begun again."""
        address = coarse.blocks[-1].address
        with self._lock:
            if address in self._under_way:
                report.refinement = Refining.PENDING
                self._under_way[address][1].append(report)
                return
            if self._closed.is_set() or len(self._under_way) >= MAX_WAITING:
                report.refinement, report.refinement_detail = Refining.FAILED, "other prefixes are being refined"
                return
            report.refinement = Refining.PENDING
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvcdn-refine")
            self._under_way[address] = self._worker.submit(self._run, coarse, supply, address), [report]

    def wait(self, timeout: float | None = None) -> None:
        """Returns when nothing is under way any more, or after so many seconds."""
        with self._lock:
            futures = [future for future, _ in self._under_way.values()]
        wait(futures, timeout)

    def close(self) -> None:
        """Gives up what is under way."""
        self._closed.set()
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.shutdown(cancel_futures=True)
        with self._lock:
            for _, reports in self._under_way.values():
                _tell(reports, Refining.FAILED, "it was given up")
            self._under_way.clear()

    def _run(self, coarse: CoarsePrefix, supply: Supply, address: Digest) -> None:
        outcome, detail = Refining.FAILED, "it ended by itself"
        try:
            self._refine(coarse, supply)
            outcome, detail = Refining.KEPT, ""
        except KvcdnError as error:
            detail = str(error)
        finally:
            with self._lock:
                _, reports = self._under_way.pop(address, (None, []))
                _tell(reports, outcome, detail)

    def _watch(self) -> None:
        if self._closed.is_set():
            raise UnavailableError("it was given up")

    def _refine(self, coarse: CoarsePrefix, supply: Supply) -> None:
        """Brings the exact KV of `coarse` into the local store, in as few bytes as can be. Raises KvcdnError."""
        refinement = refinement_of(coarse.model.precision)
        for precision in (refinement, PRECISION_NATIVE):
            if precision not in supply.precisions:
                continue
            model = replace(coarse.model, precision=precision)
            blocks = Chain(model, supply.namespace, coarse.token_ids).prefix(coarse.end).blocks
            if supply.source.match(model.tag, [name.address for name in blocks]) < len(blocks):
                continue
            rows = self._rows(coarse, supply) if precision == refinement else None
            try:
                self._bring(model, blocks, supply, rows)
            except CorruptError:
                # Rows that were written over, or were refined by somebody who had others: the coarse ones are fetched again.
                if rows is None:
                    raise
                self._bring(model, blocks, supply, None)
            return
        raise NotFoundError(f"nothing is published that makes this {coarse.model.precision} prefix exact")

    def _rows(self, coarse: CoarsePrefix, supply: Supply) -> CoarseRows | None:
        """The coarse rows, as far as the local store has them."""
        if coarse.kept is not None:
            wait([coarse.kept])
        chain = Chain(coarse.model, supply.namespace, coarse.token_ids)
        found = self._local.find(chain, (coarse.end,), supply.gate.trust, all_on("cpu", coarse.model.layout))
        if found is None:
            return None
        return CoarseRows(
            {header.address: header.etag for header in found.headers.values()},
            lambda layer, start, end: found.layers[layer].rows(start, end),
        )

    def _bring(self, model: ModelIdentity, blocks: tuple[BlockName, ...], supply: Supply, rows: CoarseRows | None) -> None:
        """Fetches exact `blocks`, and keeps them. Raises KvcdnError."""
        revoked, trust, end = supply.gate.revoked.current(), supply.gate.trust, blocks[-1].end
        revoked.require_model(model.tag)
        for name in blocks:
            revoked.require_address(name.address)
        self._watch()
        fetch = PrefixFetch(
            supply.source,
            model,
            blocks,
            length=end,
            capacity=end,
            devices=all_on("cpu", model.layout),
            trust=trust,
            coarse=rows,
            watch=self._watch,
        )
        try:
            fetch.wait()
            kept = self._local.keep(FetchedPrefix.of(fetch, model, blocks, trust))
            if kept is None or not (kept.result() or self._local.store.find(model.tag, blocks[-1].address)):
                raise UnavailableError("the local store has no room for the exact prefix")
        finally:
            fetch.close()


def _tell(reports: Sequence[Report], outcome: Refining, detail: str) -> None:
    for report in reports:
        report.refinement, report.refinement_detail = outcome, detail
