"""The check of the simulation: a real edge, real links and real readers on a small case, and the same case simulated.

Documents are published with a real model. Readers fetch them through a shaped link from an edge that cannot hold them all and
fills itself over another shaped link from a second edge, which stands for a region. The same requests are then simulated, with
sizes as published; what one fetch alone takes is measured before, for the opening speed, and for what a hit and a miss cost
beside their bytes on the links: round trips, and the work of client and edge. So the simulation knows fetches that are alone,
and says what becomes of them together. What is compared is when each fetch was complete, and what the edge had to fill. A
machine's other work holds transfers up, and those that wait behind them: so there are several rounds, each with an empty
edge, and of each request the fastest counts; how far rounds differ is told beside it, and no error below that means anything.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcdn.cli.bench.machine import machine
from kvcdn.cli.bench.shaper import shaped_link
from kvcdn.cli.options import quiet_libraries
from kvcdn.cli.rig import document_text
from kvcdn.cli.simulate_parts import REAL
from kvcdn.economics.case import Speed
from kvcdn.economics.models import plain
from kvcdn.edge.launch import RunningEdge, launch_edge
from kvcdn.errors import KvcdnError, UsageError
from kvcdn.simulation.scale import Scale
from kvcdn.simulation.topology import Edge, Origin, Readers, Region, Topology
from kvcdn.simulation.workload import Request, Zipf
from kvcdn.simulation.world import World

if TYPE_CHECKING:
    from kvcdn.client import Client

ROUND_TRIPS = 2
"""A match and the blocks, on connections that are open."""

GAUGES = 3
"""Fetches alone of each kind, of which the fastest counts."""

SPOILED = 3
"""Rounds that may be repeated, as where a machine is so busy that a fetch is given up."""

UNCOUNTED = 2
"""Documents that nobody asks for: one opens connections, one is missed and hit alone."""

_EXPONENT = 0.9


@dataclass(frozen=True)
class CheckCase:
    """What is run, both really and simulated."""

    documents: int = 10
    tokens: int = 384
    requests: int = 36
    edge_mbit: float = 100.0
    uplink_mbit: float = 60.0
    rtt_s: float = 0.010
    uplink_rtt_s: float = 0.020
    load: float = 0.6
    """Share of the edge's link that the readers ask for."""
    capacity_share: float = 0.4
    """Of all documents, what the edge can hold."""
    rounds: int = 3
    seed: int = 1


@dataclass(frozen=True)
class Stock:
    """What was published."""

    prompts: Sequence[Any]
    """A prompt of each document, and of UNCOUNTED more."""
    blocks: int
    """Of each document."""
    block_tokens: int
    stored_bytes: float
    """Of a document, on average."""
    raw_bytes: float
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class Alone:
    """What a fetch takes that is alone, the fastest of some."""

    opening: float
    """Raw bytes a second that a reader opens of what comes over no link."""
    hit_s: float
    """Beside its bytes on the link to the edge."""
    miss_s: float
    """More than a hit, beside its bytes on the slower link."""

    def best(self, other: Alone) -> Alone:
        return Alone(max(self.opening, other.opening), min(self.hit_s, other.hit_s), min(self.miss_s, other.miss_s))


def check(model: str, case: CheckCase, tell: Callable[[str], None]) -> dict[str, Any]:
    """The fields of `kvcdn simulate --check --json`: seconds, bytes, and errors as shares of what was measured."""
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="kvcdn-check-") as folder:
        tell(f"publishing {case.documents + UNCOUNTED} documents of {case.tokens:,} tokens")
        stock, make_client = _publish(model, case, Path(folder) / "origin")
        requests = _requests(case, stock)
        # Half a document more, so that it is not the last byte that decides whether one fits.
        capacity = int((int(case.capacity_share * case.documents) + 0.5) * stock.stored_bytes)
        rounds: list[Sequence[float]] = []
        filled: list[float] = []
        alone: Alone | None = None
        for number in range(case.rounds + SPOILED):
            if len(rounds) == case.rounds:
                break
            tell(f"round {len(rounds) + 1} of {case.rounds}: {len(requests)} real requests in {requests[-1].time:.0f} s")
            try:
                with _running(case, Path(folder), number, capacity) as (edge, url), make_client(url) as client:
                    found = _alone(client, make_client(edge.url), case, stock)
                    before = _counted(edge)
                    rounds.append(_ask_all(client, stock, requests))
                    filled.append(_counted(edge) - before)
            except KvcdnError as error:
                tell(f"not counted, and again: {error}")
                del rounds[len(filled) :]
            else:
                alone = found if alone is None else alone.best(found)
    if alone is None or len(rounds) < case.rounds:
        raise KvcdnError("too many rounds were spoiled", hint="try again on a machine that is less busy")
    simulated = _simulate(case, stock, requests, capacity, alone)
    return _compared(case, stock, rounds, statistics.median_low(filled), alone, simulated)


def _publish(model: str, case: CheckCase, origin: Path) -> tuple[Stock, Callable[[str], Client]]:
    from kvcdn.client import Client  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.model.load import bind_model, load_transformers  # noqa: PLC0415
    from kvcdn.model.tokens import Prompt, encode_text  # noqa: PLC0415
    from kvcdn.origin.publishing.publish import Publisher  # noqa: PLC0415
    from kvcdn.signing import SigningKey, TrustList  # noqa: PLC0415
    from kvcdn.stores import open_store  # noqa: PLC0415

    transformer, tokenizer, checkpoint = load_transformers(model, "cpu")
    key = SigningKey.generate()
    loaded = bind_model(transformer, tokenizer, checkpoint)
    publisher = Publisher(loaded, open_store(str(origin)), key)
    text = encode_text(tokenizer, document_text(None)).token_ids
    documents = case.documents + UNCOUNTED
    step = (len(text) - case.tokens) // (documents - 1)
    if step < 1:
        raise UsageError(f"the text on this machine has {len(text):,} tokens, too few", hint="ask for shorter documents")
    prompts, stored, raw, blocks = [], 0, 0, 0
    for number in range(documents):
        part = text[number * step : number * step + case.tokens]
        done = publisher.publish(part)
        stored, raw, blocks = stored + done.stored_bytes, raw + done.raw_bytes, done.blocks
        prompts.append(Prompt((*part, part[0]), (len(part),)))
    sizes = (stored / len(prompts), raw / len(prompts))
    stock = Stock(prompts, blocks, -(-case.tokens // blocks), *sizes, machine(loaded))

    def make_client(url: str) -> Client:
        trust = TrustList.of(key.public)
        return Client(transformer, tokenizer, url, checkpoint=checkpoint, trust=trust, local_store=None, mode="fetch")

    return stock, make_client


@contextmanager
def _running(case: CheckCase, folder: Path, number: int, capacity: int) -> Iterator[tuple[RunningEdge, str]]:
    """The edge that is checked, and the URL of the shaped link to it."""
    log: Any = {"log_level": "warning"}
    with (
        launch_edge(origin=str(folder / "origin"), cache_dir=folder / f"region-{number}", **log) as region,
        shaped_link(region.port, case.uplink_mbit, case.uplink_rtt_s) as uplink,
        launch_edge(origin=uplink.url, cache_dir=folder / f"edge-{number}", capacity=capacity, **log) as edge,
        shaped_link(edge.port, case.edge_mbit, case.rtt_s) as link,
    ):
        yield edge, link.url


def _requests(case: CheckCase, stock: Stock) -> list[Request]:
    apart = stock.stored_bytes / (case.edge_mbit * 1e6 / 8) / case.load
    zipf = Zipf(
        requests=case.requests,
        seconds=case.requests * apart,
        documents=case.documents,
        exponent=_EXPONENT,
        document_tokens=case.tokens,
        question_tokens=1,
        block_tokens=stock.block_tokens,
    )
    return list(zipf.draw(case.requests, [1], case.seed))


def _alone(client: Client, unshaped: Client, case: CheckCase, stock: Stock) -> Alone:
    """Fetches one after the other; `client` is behind the links, `unshaped` beside the edge. One miss and the hits after it."""
    first, second = stock.prompts[-2:]
    _timed(client, first)
    missed = _timed(client, second)
    hit = min(_timed(client, second) for _ in range(GAUGES))
    with unshaped:
        opened = min(_timed(unshaped, second) for _ in range(GAUGES + 1))
    link, slowest = (1e6 / 8 * mbit for mbit in (case.edge_mbit, min(case.edge_mbit, case.uplink_mbit)))
    hit_s = max(hit - stock.stored_bytes / link, 0.0)
    return Alone(stock.raw_bytes / opened, hit_s, max(missed - stock.stored_bytes / slowest - hit_s, 0.0))


def _timed(client: Client, prompt: Any) -> float:
    started = time.monotonic()
    _fetch(client, prompt)
    return time.monotonic() - started


def _fetch(client: Client, prompt: Any) -> None:
    report = client.prepare(prompt).report
    if report.tokens_reused < report.tokens_total - 1:
        raise KvcdnError(f"a document was not fetched as a whole: {report}", hint="try again on a machine that is less busy")


def _ask_all(client: Client, stock: Stock, requests: Sequence[Request]) -> list[float]:
    """Seconds that each request took, asked in time, each in a thread of its own."""
    found = [float("nan")] * len(requests)
    failures: list[Exception] = []
    began = time.monotonic()

    def ask(number: int, request: Request) -> None:
        try:
            _fetch(client, stock.prompts[request.chain[0] // stock.blocks])
        except Exception as error:  # noqa: BLE001 - told by the thread that waits
            failures.append(error)
        found[number] = time.monotonic() - began - request.time

    threads = []
    for number, request in enumerate(requests):
        time.sleep(max(began + request.time - time.monotonic(), 0.0))
        threads.append(threading.Thread(target=ask, args=(number, request), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return found


def _counted(edge: RunningEdge) -> float:
    """Bytes that the edge has filled."""
    with urllib.request.urlopen(f"{edge.admin_url}/metrics", timeout=30) as answer:  # noqa: S310 - our own edge
        text = answer.read(1 << 20).decode()
    match = re.search(r"^kvcdn_edge_origin_bytes_total (\S+)$", text, re.MULTILINE)
    if match is None:
        raise KvcdnError("the edge does not say how many bytes it has filled")
    return float(match[1])


def _simulate(case: CheckCase, stock: Stock, requests: Sequence[Request], capacity: int, alone: Alone) -> World:
    """The same, simulated: what the model computes takes no time, as nothing is computed in a fetch.

    A hit waits ROUND_TRIPS times for the link to the edge; a miss twice more for that to the region: to match, and to fill.
    """
    model = plain("as published", stock.raw_bytes / case.tokens, 1.0, "measured")
    scale = Scale(model, stock.stored_bytes / stock.raw_bytes, Speed(0.0, tokens_per_s=1e12), stock.block_tokens)
    edge = Edge(
        name="edge",
        region="region",
        capacity_gb=capacity / 1e9,
        mbit=case.edge_mbit,
        reader_mbit=case.edge_mbit,
        rtt_ms=1000 * alone.hit_s / ROUND_TRIPS,
        uplink_mbit=case.uplink_mbit,
        uplink_rtt_ms=1000 * alone.miss_s / 2,
    )
    topology = Topology(
        origin=Origin(latency_ms=0.0),
        readers=Readers(mode="fetch", round_trips=ROUND_TRIPS, open_mb_per_s=alone.opening / 1e6),
        regions=(Region(name="region", rtt_ms=0.0),),
        edges=(edge,),
    )
    world = World(topology, scale, REAL, with_kvcdn=True)
    node = world.sites[0].node
    if node is not None:
        # What was fetched alone from the real edge lies in it, too.
        for document in range(case.documents, case.documents + UNCOUNTED):
            node.cache.use(range(document * stock.blocks, (document + 1) * stock.blocks))
    world.catalogue.publish_documents(case.documents, case.tokens)
    world.run(requests)
    return world


def _compared(
    case: CheckCase, stock: Stock, rounds: Sequence[Sequence[float]], filled: float, alone: Alone, world: World
) -> dict[str, Any]:
    tally, node = world.sites[0].tally, world.sites[0].node
    simulated, really, slowest = (
        tally.first_token_s,
        list(map(min, zip(*rounds, strict=True))),
        list(map(max, zip(*rounds, strict=True))),
    )
    by_bytes = case.requests * stock.stored_bytes
    modelled = node.counts.filled_bytes if node is not None else 0.0
    rows = {}
    for name, of in (("mean", statistics.fmean), ("p50", statistics.median), ("p90", _p90), ("max", max)):
        rows[name] = {
            "real_s": round(of(really), 4),
            "slowest_s": round(of(slowest), 4),
            "simulated_s": round(of(simulated), 4),
        }
        rows[name]["error"] = round(of(simulated) / of(really) - 1, 4)
        apart = [of(one) / of(really) - 1 for one in rounds]
        rows[name]["rounds_apart"] = round(statistics.median(apart), 4)
    return {
        "requests": case.requests,
        "documents": case.documents,
        "document_bytes": round(stock.stored_bytes),
        "edge_mbit": case.edge_mbit,
        "uplink_mbit": case.uplink_mbit,
        "load": case.load,
        "rounds": case.rounds,
        "alone": {
            "open_bytes_per_s": round(alone.opening),
            "hit_s": round(alone.hit_s, 4),
            "round_trips_of_a_hit_s": round(ROUND_TRIPS * case.rtt_s, 4),
            "miss_s": round(alone.miss_s, 4),
            "round_trips_of_a_miss_s": round(2 * case.uplink_rtt_s, 4),
        },
        "fetch": rows,
        "hit_ratio": {"real": round(1 - filled / by_bytes, 4), "simulated": round(1 - modelled / by_bytes, 4)},
        "filled_bytes": {"real": round(filled), "simulated": round(modelled)},
        "machine": stock.machine,
    }


def _p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]
