"""Where fetching and prefilling cross, measured: what `kvcdn bench crossover` reports.

Links are shaped by a process of their own (`kvcdn.cli.bench.shaper`) between the client and a warm edge. Every round takes
prefill, fetch and auto in turn, in alternating order, each timed from the text to the first token.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvcdn.cli.bench.machine import machine, spread
from kvcdn.cli.bench.shaper import shaped_link
from kvcdn.cli.rig import QUESTION, Rig, running_rig
from kvcdn.client import Client
from kvcdn.client.sources.transport import EdgeSource
from kvcdn.edge.launch import launch_edge
from kvcdn.errors import KvcdnError
from kvcdn.keys import PrefixNames, block_key

if TYPE_CHECKING:
    from kvcdn.client import Answer
    from kvcdn.origin.publishing.publish import PublishProgress

AROUND = (0.125, 0.35, 1.0, 3.0, 8.0)
"""Links tried by default, as multiples of the one on which fetching takes as long as prefilling."""

ENDS = (1.0, 1000.0, 10000.0)
"""Links tried by default besides, in Mbit/s: what was asked of the plan is that it is right on all of them."""

GAUGE_SECONDS = 1.5
"""How long a link's real rate is measured."""

GAUGES = 3

SHAPED = 0.95
"""A link that reaches less of its rate is limited by this machine, and not shaped."""

_KNOWN_BYTES = 300_000
"""Enough to know a link by (`kvcdn.client.network.link.LEAST_BYTES`)."""

_KILL_LINKS = (0.5, 1.0, 2.0, 6.0, 12.0)
"""Links on which the edge is killed, as multiples as above."""


def measure_crossover(
    model: str,
    document: Path | None,
    tokens: int,
    mbits: Sequence[float],
    runs: int,
    device: str,
    *,
    latency_s: float,
    fetch_limit_s: float,
    kills: int,
    progress: Callable[[PublishProgress], None],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The rows of `kvcdn bench crossover --json`, one a link; without `mbits` links around the crossover and the extremes.

    Times are medians of `runs` in seconds. `auto_first_s` is the first time the client meets the link. A fetch that would take
    longer than `fetch_limit_s` is not made: `fetch_s` is then what its bytes take on the link as measured, and
    `fetch_estimated` is true.
    """
    with running_rig(model, document, tokens, progress, device=device) as rig:
        tell("the first prefill and the first fetch")
        first = _ask(rig.client, rig, "compute")
        fetched = _ask(rig.client, rig, "fetch")
        wire = fetched.report.bytes_fetched
        crossover = wire * 8 / 1e6 / first.report.seconds["first_token"]
        rows = []
        for mbit in mbits or sorted({*ENDS, *(round(crossover * factor, 3) for factor in AROUND)}):
            rows.append(_row(rig, mbit, runs, wire, latency_s=latency_s, fetch_limit_s=fetch_limit_s, tell=tell))
            tell(_in_words(rows[-1]))
        prefill = statistics.median(row["prefill_s"] for row in rows)
        meeting = wire * 8 / 1e6 / prefill
        nearest = min(rows, key=lambda row: abs(math.log(row["mbit"] / meeting)))
        result: dict[str, Any] = {
            "tokens": rig.published.tokens,
            "blocks": rig.published.blocks,
            "wire_bytes": wire,
            "crossover_mbit": round(meeting, 3),
            "rows": rows,
            "worst_over_best": max(row["auto_over_best"] for row in rows),
            "best_at_crossover": nearest["auto_over_best"],
            "runs": runs,
            "latency_s": latency_s,
        }
        if kills:
            result["kill"] = _kill_rows(rig, crossover, prefill, kills, latency_s, tell)
        result["machine"] = machine(rig.client.loaded)
        return result


def _row(
    rig: Rig, mbit: float, runs: int, wire: int, *, latency_s: float, fetch_limit_s: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {"prefill": [], "fetch": [], "auto": []}
    decisions: list[str] = []
    with shaped_link(rig.edge.port, mbit, latency_s) as link, _client(rig, link.url) as client:
        # A busy machine may hold a download up, and no link is faster than it is: the best of a few tries tells.
        rate = 0.0
        for _ in range(GAUGES):
            rate = max(rate, _gauge(link.url, rig))
            if rate >= SHAPED * mbit:
                break
        estimated = wire * 8 / 1e6 / rate > fetch_limit_s
        first = _ask(client, rig, "auto")
        for run in range(runs):
            order = ("prefill", "fetch", "auto") if run % 2 == 0 else ("auto", "fetch", "prefill")
            for name in order:
                if name == "fetch" and estimated:
                    samples[name].append(wire * 8 / 1e6 / rate)
                    continue
                tell(f"{mbit:g} Mbit/s, round {run + 1} of {runs}: {name}")
                answer = _ask(client, rig, "compute" if name == "prefill" else name)
                samples[name].append(answer.report.seconds["first_token"])
                if name == "auto":
                    decisions.append(_decision(answer))
    prefill, fetch, auto = (statistics.median(samples[name]) for name in ("prefill", "fetch", "auto"))
    return {
        "mbit": mbit,
        "measured_mbit": round(rate, 3),
        "shaped": rate >= SHAPED * mbit,
        "prefill_s": round(prefill, 4),
        "fetch_s": round(fetch, 4),
        "fetch_estimated": estimated,
        "auto_s": round(auto, 4),
        "auto_first_s": round(first.report.seconds["first_token"], 4),
        "auto_over_best": round(auto / min(prefill, fetch), 3),
        "decision": statistics.mode(decisions),
        "first_decision": _decision(first),
        "samples_s": {name: [round(value, 4) for value in values] for name, values in samples.items()},
        "spread_s": {name: spread(values) for name, values in samples.items()},
    }


def _kill_rows(
    rig: Rig, crossover: float, prefill: float, kills: int, latency_s: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Edges killed at random moments of an auto run: on links around the crossover, known to the client or not.

    Before each a prefill is timed, and their median counts, as a machine does not keep its speed; `prefill` is what one takes.
    """
    chance = random.Random(0)  # noqa: S311 - to repeat the same moments
    rows: list[dict[str, Any]] = []
    prefills: list[float] = []
    for trial in range(kills):
        prefills.append(_ask(rig.client, rig, "compute").report.seconds["first_token"])
        mbit = crossover * _KILL_LINKS[trial % len(_KILL_LINKS)]
        with _own_edge(rig, mbit, latency_s) as (url, process), _client(rig, url) as client:
            known = trial % 2 == 1
            if known:
                _get_to_know(client, rig)
            # While it is most likely still running: both at once take as long as this.
            moment = chance.random() / (1 / prefill + mbit * 1e6 / 8 / rig.published.stored_bytes)
            timer = threading.Timer(moment, process.kill)
            timer.start()
            answer = _ask(client, rig, "auto")
            timer.cancel()
        seconds = answer.report.seconds["first_token"]
        rows.append(
            {
                "mbit": round(mbit, 3),
                "link_known": known,
                "killed_after_s": round(moment, 3),
                "auto_s": round(seconds, 4),
                "decision": _decision(answer),
                "reason": answer.report.reason,
            }
        )
        tell(f"killed after {moment:.1f} s at {mbit:.1f} Mbit/s: {seconds:.1f} s, {seconds / prefills[-1]:.2f} x a prefill")
    usual = statistics.median(prefills)
    for row in rows:
        row["over_prefill"] = round(row["auto_s"] / usual, 3)
    return {
        "rows": rows,
        "prefill_s": round(usual, 4),
        "spread_s": spread(prefills),
        "worst_over_prefill": max(row["over_prefill"] for row in rows),
    }


@contextlib.contextmanager
def _own_edge(rig: Rig, mbit: float, latency_s: float) -> Iterator[tuple[str, Any]]:
    """A warm edge that may be killed, behind a link: its URL and its process."""
    with (
        tempfile.TemporaryDirectory(prefix="kvcdn-") as folder,
        launch_edge(origin=rig.origin, cache_dir=folder, log_level="warning") as edge,
    ):
        for key in _block_keys(rig):
            for _ in _download(edge.url, key):
                pass
        with shaped_link(edge.port, mbit, latency_s) as link:
            yield link.url, edge.process


def _client(rig: Rig, url: str) -> Client:
    return Client(rig.client.model, rig.client.tokenizer, EdgeSource(url), trust=rig.client.trust, local_store=None)


def _ask(client: Client, rig: Rig, mode: str) -> Answer:
    return client.ask(rig.document, QUESTION, max_new_tokens=1, do_sample=False, mode=mode)


def _decision(answer: Answer) -> str:
    """The modes in the order in which they were chosen: `fetch`, `both`, `fetch>both`."""
    plan = answer.report.plan
    return ">".join([plan["mode"], *(switch["mode"] for switch in plan["switches"])]) if plan else "none"


def _block_keys(rig: Rig) -> list[str]:
    if rig.client.loaded is None:
        raise KvcdnError("the model is not bound")
    identity, ids = rig.client.loaded.identity, rig.client.encode(rig.document).token_ids
    return [block_key(identity.tag, name.address) for name in PrefixNames.of(identity, rig.client.namespace, ids).blocks]


def _gauge(url: str, rig: Rig) -> float:
    """Megabits a second of object bytes that a plain download gets, from its first piece to its last."""
    count, first, last = 0, 0.0, 0.0
    for key in _block_keys(rig) * 1000:
        for received, at in _download(url, key):
            # What comes first has waited for the connection.
            first, count, last = (first, count + received, at) if first else (at, 0, at)
            if at - first > GAUGE_SECONDS:
                return count * 8 / 1e6 / (last - first)
    return count * 8 / 1e6 / max(last - first, 1e-9)


def _get_to_know(client: Client, rig: Rig) -> None:
    """Lets a client measure its link, by a part of a block."""
    with contextlib.closing(client.source.open(_block_keys(rig)[0], ranged=True)) as reader:
        reader.read_exact(_KNOWN_BYTES)


def _download(url: str, key: str) -> Iterator[tuple[int, float]]:
    """Downloads an object: bytes of each piece, and when it was there."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", f"/{key}")
        response = connection.getresponse()
        while piece := response.read1(1 << 18):
            yield len(piece), time.perf_counter()


def _in_words(row: dict[str, Any]) -> str:
    return (
        f"{row['mbit']:g} Mbit/s: prefill {row['prefill_s']:.2f} s, fetch {row['fetch_s']:.2f} s, auto {row['auto_s']:.2f} s"
        f" ({row['decision']}), {row['auto_over_best']:.2f} x the better"
    )
