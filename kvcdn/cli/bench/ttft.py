"""Time to first token, measured: what `kvcdn bench ttft` reports."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvcdn.cli.bench.machine import machine, spread
from kvcdn.cli.options import quiet_libraries
from kvcdn.cli.rig import QUESTION, Rig, running_rig
from kvcdn.cli.stock import StockAnswer, floor_answer, stock_answer
from kvcdn.client import Client
from kvcdn.codecs.compiled import wait_until_compiled
from kvcdn.errors import KvcdnError
from kvcdn.model.load import LoadedModel
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.model.tokens import Prompt
from kvcdn.signing import PublicKey, TrustList
from kvcdn.stores.local import LocalStore

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from kvcdn.client import Answer, Prepared
    from kvcdn.origin.publishing.publish import PublishProgress


def measure_ttft(
    model: str,
    document: Path | None,
    tokens: int,
    runs: int,
    device: str,
    *,
    progress: Callable[[PublishProgress], None],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The rows of `kvcdn bench ttft --json`; times are medians in seconds, sizes in bytes.

    Each round takes stock prefill, edge, local store and floor in turn, beginning with another: the floor from token ids and
    a cache in memory, the others from the text. `wire_bytes` are object bytes fetched in one edge run, without HTTP's own.
    `local_first_s` is what a process needs to check and map what another has kept, `local_again_s` for each further prompt.
    `client_cpu_s_per_gb` is the client's processor time for a fetch, by the bytes fetched.
    """
    with running_rig(model, document, tokens, progress, device=device) as rig:
        tell("a first fetch, in a process of its own, to see how much memory it takes")
        peak = fetch_peak(model, rig)
        edge_answer(rig)  # warms the process
        tell("keeping it in a local store, to be mapped by a process of its own")
        rig.local_client.ask(rig.document, QUESTION, max_new_tokens=1, do_sample=False)
        rig.local_client.close()  # waits until it is kept
        first, again = local_load(model, rig)
        prepared = rig.client.prepare(rig.client.question(rig.document, QUESTION))
        samples: dict[str, list[float]] = {"prefill": [], "edge": [], "local": [], "floor": []}
        firsts: set[tuple[int, ...]] = set()
        reports, cpu_s_per_gb = [], []
        ids = tuple(prepared.input_ids[0].tolist())
        ways: dict[str, Callable[[], Answer | StockAnswer]] = {
            "prefill": lambda: stock_answer(rig.client, rig.document, QUESTION, 1),
            "edge": lambda: edge_answer(rig),
            "local": lambda: local_answer(rig),
            "floor": lambda: floor_answer(rig.client, ids, _copy_cache(rig, prepared), 1),
        }
        for run in range(runs):
            tell(f"round {run + 1} of {runs}")
            # Each begins a round in its turn: what follows a long prefill finds nothing of its own in the processor's caches.
            names = list(ways)[run % len(ways) :] + list(ways)[: run % len(ways)]
            for name in names:
                answer = ways[name]()
                samples[name].append(
                    answer.first_token_s if isinstance(answer, StockAnswer) else answer.report.seconds["first_token"]
                )
                firsts.add(answer.token_ids)
                if name == "edge" and not isinstance(answer, StockAnswer):
                    reports.append(answer.report)
            cpu_s_per_gb.append(fetch_cpu_s_per_gb(rig))
        tell("prefilling once more on the publisher's schedule, to compare every bit")
        prefill, edge, local_s, floor_s = (statistics.median(values) for values in samples.values())
        return {
            "tokens": rig.published.tokens,
            "prefill_ttft_s": round(prefill, 4),
            "edge_ttft_s": round(edge, 4),
            "floor_ttft_s": round(floor_s, 4),
            "speedup": round(prefill / edge, 2),
            "over_floor": round(edge / floor_s, 3),
            "local_ttft_s": round(local_s, 4),
            "local_over_floor": round(local_s / floor_s, 3),
            "local_speedup": round(prefill / local_s, 2),
            "local_first_s": round(first, 4),
            "local_again_s": round(again, 4),
            "raw_bytes": reports[-1].bytes_raw,
            "wire_bytes": reports[-1].bytes_fetched,
            "wire_ratio": round(reports[-1].bytes_fetched / reports[-1].bytes_raw, 4),
            "bit_identical": _bit_identical(rig, prepared),
            "first_tokens_equal": len(firsts) == 1,
            "fetch_peak_bytes": peak,
            "fetch_peak_over_kv": None if peak is None else round(peak / reports[-1].bytes_raw, 3),
            "client_cpu_s_per_gb": round(statistics.median(cpu_s_per_gb), 3),
            "edge_resident_bytes": rig.edge.resident_bytes("VmHWM"),
            "runs": runs,
            "samples_s": {name: [round(value, 4) for value in values] for name, values in samples.items()},
            "spread_s": {name: spread(values) for name, values in samples.items()},
            "edge_stages_s": _median_stages(reports),
            "machine": machine(_loaded(rig)),
        }


def edge_answer(rig: Rig) -> Answer:
    """One question through the edge. Raises KvcdnError where it was not answered from there: a benchmark of misses is none."""
    answer = rig.client.ask(rig.document, QUESTION, max_new_tokens=1, do_sample=False)
    if answer.report.tokens_reused != rig.published.tokens:
        raise KvcdnError(f"the edge did not serve the whole document: {answer.report}")
    return answer


def local_answer(rig: Rig) -> Answer:
    """One question through the local store, without any request. Raises KvcdnError where that did not have it."""
    answer = rig.local_client.ask(rig.document, QUESTION, max_new_tokens=1, do_sample=False)
    if answer.report.tokens_local != rig.published.tokens or "match" in answer.report.seconds:
        raise KvcdnError(f"the local store did not have the whole document: {answer.report}")
    return answer


def _loaded(rig: Rig) -> LoadedModel:
    if rig.client.loaded is None:  # running_rig has bound this very model already
        raise KvcdnError("the model is not bound")
    return rig.client.loaded


def _copy_cache(rig: Rig, prepared: Prepared) -> Cache:
    """A plain DynamicCache with a copy of the loaded tensors, contiguous as the library itself keeps them."""
    cache = DynamicCache(config=rig.client.model.config)
    for source, target in zip(prepared.cache.layers if prepared.cache else (), cache.layers, strict=True):
        if source.keys is None:
            continue
        keys, values = source.keys.contiguous().clone(), source.values.contiguous().clone()
        target.lazy_initialization(keys, values)
        target.keys, target.values = keys, values
        if hasattr(target, "cumulative_length"):
            target.cumulative_length = source.cumulative_length
    return cache


def _bit_identical(rig: Rig, prepared: Prepared) -> bool:
    loaded, tokens = _loaded(rig), rig.published.tokens
    token_ids = prepared.input_ids[0, :tokens].tolist()
    layers = prepared.cache.layers if prepared.cache else []
    for block in ScheduledPrefill(loaded.model, loaded.identity.layout, tokens).run(token_ids):
        for layer, tensors in zip(layers, block.layers, strict=True):
            # Layers with a window begin where the window of the whole prefix needs them to.
            start = max(block.start, layer.first)
            if start >= block.end:
                continue
            for ours, theirs in zip(tensors, layer.rows(start, block.end), strict=True):
                if not torch.equal(ours[start - block.start :].view(torch.uint8), theirs.cpu().view(torch.uint8)):
                    return False
    return True


def fetch_peak(model: str, rig: Rig) -> int | None:
    """Bytes by which resident memory rises at its highest while the cache is fetched; None off Linux.

    In a new process, since one that has prefilled keeps freed memory, in which a fetch would hide.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_in_this_process, model, rig.edge.url, tuple(rig.client.trust.names), rig.document).result()


def fetch_cpu_s_per_gb(rig: Rig) -> float:
    """Processor seconds of this process, all threads, per 10^9 object bytes fetched, verified and decoded; not the edge's."""
    prompt = rig.client.question(rig.document, QUESTION)
    before = time.process_time()
    report = rig.client.prepare(prompt).report
    return (time.process_time() - before) / report.bytes_fetched * 1e9


def local_load(model: str, rig: Rig) -> tuple[float, float]:
    """Seconds in which a new process has the document's cache from the local store, checked: the first time, and after that."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        publishers = tuple(rig.client.trust.names)
        return pool.submit(_load_in_this_process, model, str(rig.local_folder), publishers, rig.document).result()


def _load_in_this_process(model: str, folder: str, publishers: tuple[PublicKey, ...], document: str) -> tuple[float, float]:
    quiet_libraries()
    store = LocalStore(Path(folder))
    # The source is empty: what comes can only come from the store.
    with Client.load(model, "memory:", trust=TrustList.of(*publishers), local_store=store) as client:
        prompt = client.question(document, QUESTION)
        first, *others = (client.prepare(prompt).report for _ in range(6))
        if not first.tokens_local:
            raise KvcdnError(f"the local store did not have the document: {first}")
        return first.seconds["local"], statistics.median(report.seconds["local"] for report in others)


def _peak_in_this_process(model: str, url: str, publishers: tuple[PublicKey, ...], document: str) -> int | None:
    quiet_libraries()
    with Client.load(model, url, trust=TrustList.of(*publishers), local_store=None, mode="fetch") as client:
        # Everything but the fetch happens once before, so that only the fetch is counted.
        prompt = client.question(document, QUESTION)
        client.generate(Prompt(prompt.token_ids[:8]), max_new_tokens=1, do_sample=False)
        wait_until_compiled()
        try:
            Path("/proc/self/clear_refs").write_text("5", "ascii")
            before = status_bytes("VmRSS")
            client.prepare(prompt)
            return status_bytes("VmHWM") - before
        except OSError:
            return None


def status_bytes(field: str) -> int:
    """Resident bytes of this process, now (`VmRSS`) or at most (`VmHWM`). Raises OSError where the system does not tell."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _median_stages(reports: list[Any]) -> dict[str, float]:
    return {stage: round(statistics.median(report.seconds[stage] for report in reports), 4) for stage in reports[0].seconds}
