"""The check of the simulation: a real edge, real links and real readers on a small case, and the same case simulated.

Documents are published with a real model. Readers fetch them through a shaped link from an edge that cannot hold them all and
fills itself over another shaped link from a second edge, which stands for a region. The same requests are then simulated, with
sizes as published and the opening speed as measured before; what is compared is when each fetch was complete, and what the
edge had to fill. A machine's other work holds transfers up, and those that wait behind them: so there are several rounds, each
with an empty edge, and of each request the fastest counts; the slowest is told beside it.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcdn.cli.options import quiet_libraries
from kvcdn.cli.rig import document_text
from kvcdn.cli.shaper import shaped_link
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
"""Fetches over a link that is not shaped, whose fastest tells how fast this machine opens."""

_EXPONENT = 0.9


@dataclass(frozen=True)
class CheckCase:
    """What is run, both really and simulated."""

    documents: int = 10
    tokens: int = 512
    requests: int = 40
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
    """A prompt of each document, and one more, for warming up."""
    blocks: int
    """Of each document."""
    block_tokens: int
    stored_bytes: float
    """Of a document, on average."""
    raw_bytes: float


def check(model: str, case: CheckCase, tell: Callable[[str], None]) -> dict[str, Any]:
    """The fields of `kvcdn simulate --check --json`: seconds, bytes, and errors as shares of what was measured."""
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="kvcdn-check-") as folder:
        tell(f"publishing {case.documents + 1} documents of {case.tokens:,} tokens")
        stock, make_client = _publish(model, case, Path(folder) / "origin")
        requests = _requests(case, stock)
        # Half a document more, so that it is not the last byte that decides whether one fits.
        capacity = int((int(case.capacity_share * case.documents) + 0.5) * stock.stored_bytes)
        rounds, filled, opening = [], [], 0.0
        for number in range(case.rounds):
            with _running(case, Path(folder), number, capacity) as (edge, url):
                opening = max(opening, _opening(make_client(edge.url), stock))
                tell(f"round {number + 1} of {case.rounds}: {len(requests)} real requests in {requests[-1].time:.0f} s")
                with make_client(url) as client:
                    client.prepare(stock.prompts[-1])
                    before = _counted(edge)
                    rounds.append(_ask_all(client, stock, requests))
                    filled.append(_counted(edge) - before)
    simulated = _simulate(case, stock, requests, capacity, opening)
    return _compared(case, stock, rounds, statistics.median(filled), opening, simulated)


def _publish(model: str, case: CheckCase, origin: Path) -> tuple[Stock, Callable[[str], Client]]:
    from kvcdn.client import Client  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.model.load import bind_model, load_transformers  # noqa: PLC0415
    from kvcdn.model.tokens import Prompt, encode_text  # noqa: PLC0415
    from kvcdn.origin.publish import Publisher  # noqa: PLC0415
    from kvcdn.signing import SigningKey, TrustList  # noqa: PLC0415
    from kvcdn.stores import open_store  # noqa: PLC0415

    transformer, tokenizer, checkpoint = load_transformers(model, "cpu")
    key = SigningKey.generate()
    publisher = Publisher(bind_model(transformer, tokenizer, checkpoint), open_store(str(origin)), key)
    text = encode_text(tokenizer, document_text(None)).token_ids
    step = (len(text) - case.tokens) // case.documents
    if step < 1:
        raise UsageError(f"the text on this machine has {len(text):,} tokens, too few", hint="ask for shorter documents")
    prompts, stored, raw, blocks = [], 0, 0, 0
    for number in range(case.documents + 1):
        part = text[number * step : number * step + case.tokens]
        done = publisher.publish(part)
        stored, raw, blocks = stored + done.stored_bytes, raw + done.raw_bytes, done.blocks
        prompts.append(Prompt((*part, part[0]), (len(part),)))
    stock = Stock(prompts, blocks, -(-case.tokens // blocks), stored / len(prompts), raw / len(prompts))

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


def _opening(client: Client, stock: Stock) -> float:
    """Raw bytes a second that a reader opens of what comes from the edge over no link, where it has them."""
    with client:
        best = 0.0
        for _ in range(GAUGES + 1):
            started = time.monotonic()
            _fetch(client, stock.prompts[-1])
            best = max(best, stock.raw_bytes / (time.monotonic() - started))
    return best


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


def _simulate(case: CheckCase, stock: Stock, requests: Sequence[Request], capacity: int, opening: float) -> World:
    """The same, simulated: what the model computes takes no time, as nothing is computed in a fetch."""
    model = plain("as published", stock.raw_bytes / case.tokens, 1.0, "measured")
    scale = Scale(model, stock.stored_bytes / stock.raw_bytes, Speed(0.0, tokens_per_s=1e12), stock.block_tokens)
    edge = Edge(
        name="edge",
        region="region",
        capacity_gb=capacity / 1e9,
        mbit=case.edge_mbit,
        reader_mbit=case.edge_mbit,
        rtt_ms=1000 * case.rtt_s,
        uplink_mbit=case.uplink_mbit,
        uplink_rtt_ms=1000 * case.uplink_rtt_s,
    )
    topology = Topology(
        origin=Origin(latency_ms=0.0),
        readers=Readers(mode="fetch", round_trips=ROUND_TRIPS, open_mb_per_s=opening / 1e6),
        regions=(Region(name="region", rtt_ms=0.0),),
        edges=(edge,),
    )
    world = World(topology, scale, REAL, with_kvcdn=True)
    node = world.sites[0].node
    if node is not None:
        # The document that warmed the real edge up lies in it, too.
        node.cache.use(range(case.documents * stock.blocks, (case.documents + 1) * stock.blocks))
    world.catalogue.publish_documents(case.documents, case.tokens)
    world.run(requests)
    return world


def _compared(
    case: CheckCase, stock: Stock, rounds: Sequence[Sequence[float]], filled: float, opening: float, world: World
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
    return {
        "requests": case.requests,
        "documents": case.documents,
        "document_bytes": round(stock.stored_bytes),
        "edge_mbit": case.edge_mbit,
        "uplink_mbit": case.uplink_mbit,
        "load": case.load,
        "rounds": case.rounds,
        "open_bytes_per_s": round(opening),
        "fetch": rows,
        "hit_ratio": {"real": round(1 - filled / by_bytes, 4), "simulated": round(1 - modelled / by_bytes, 4)},
        "filled_bytes": {"real": round(filled), "simulated": round(modelled)},
    }


def _p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[-1]
