"""An edge beside nginx: warm hits, manifests, a stampede on a cold object, cold misses, and slow readers.

Both serve the same bytes from the same disk, each in its own processes, to one load generator in a process of its own; rounds
alternate, and medians are told. Every object is signed and hashed, and the edge checks it, as in life.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from kvcdn.cli.bench.http_load import Load, Loaded, run_load, run_load_here
from kvcdn.cli.bench.machine import machine, spread
from kvcdn.cli.bench.nginx import running_nginx
from kvcdn.cli.bench.objects import BenchObject, write_object
from kvcdn.cli.output import size
from kvcdn.edge.launch import RunningEdge, launch_edge

MIB = 1 << 20

BLOCK_SEGMENTS, BLOCK_SEGMENT_BYTES = 32, MIB // 2
"""16 MiB, as a block of a model of 32 layers."""

SMALL_SEGMENT_BYTES = 2700
"""With its envelope 4 KiB: the size of a manifest of some blocks."""

COLD_SEGMENT_BYTES = 8 * MIB

COLD_OBJECTS = 40
"""Objects for the time to the first byte of a cold miss, each asked for once."""

SLOW_READ_BYTES = 64 * 1024

POLL_SECONDS = 0.05

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    seconds: float
    """Of one round of warm hits."""
    rounds: int
    connections: tuple[int, ...] = (1, 4, 64)
    clients: int = 200
    cold_bytes: int = 256 * MIB
    readers: int = 1000
    slow_bytes: int = 5 << 30


def measure_edge(sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """All rows. Raises UnavailableError where there is no nginx."""
    with tempfile.TemporaryDirectory(prefix="kvcdn-bench-") as name:
        folder = Path(name)
        tell(f"an edge and nginx are started; warm hits, {sizes.rounds} rounds of {sizes.seconds:g} s of each")
        origin = folder / "origin"
        block = write_object(origin, BLOCK_SEGMENTS, BLOCK_SEGMENT_BYTES)
        small = write_object(origin, 1, SMALL_SEGMENT_BYTES)
        with (
            running_nginx(folder / "nginx", f"root {origin};") as nginx,
            launch_edge(origin=str(origin), cache_dir=folder / "cache", log_level="warning") as edge,
        ):
            rows = [_compare(block, connections, sizes, edge.url, nginx, tell) for connections in sizes.connections]
            manifests = _compare(small, max(sizes.connections), sizes, edge.url, nginx, tell)
            misses = _cold_misses(folder, nginx, tell)
        return {
            "rows": rows,
            "manifests": manifests,
            "cold_miss": misses,
            "stampede": _stampede(folder, sizes, tell),
            "slow_readers": _slow_readers(folder, sizes, tell),
            "rounds": sizes.rounds,
            "machine": machine(),
        }


def _compare(block: BenchObject, connections: int, sizes: Sizes, edge: str, nginx: str, tell: Tell) -> dict[str, Any]:
    """Warm hits of one object from both, alternating."""
    for url in (edge, nginx):
        _ask(url, block, 1, 0.0)
    # The last byte is here before the disk has made the object durable, and until then there are no hits.
    while _metric(edge, "kvcdn_edge_fills_running"):
        time.sleep(POLL_SECONDS)
    loaded: dict[str, list[Loaded]] = {edge: [], nginx: []}
    for number in range(sizes.rounds):
        for url in (edge, nginx) if number % 2 else (nginx, edge):
            loaded[url].append(_ask(url, block, connections, sizes.seconds))
        tell(f"{block.size:,} bytes, {connections} connections: round {number + 1} of {sizes.rounds}")

    def median(url: str, value: Callable[[Loaded], float]) -> float:
        return statistics.median(value(one) for one in loaded[url])

    def gbps(one: Loaded) -> float:
        return one.bytes * 8 / one.seconds / 1e9

    def spreads(value: Callable[[Loaded], float]) -> dict[str, dict[str, float]]:
        return {name: spread([value(one) for one in loaded[url]]) for name, url in (("edge", edge), ("nginx", nginx))}

    row = {
        "size": block.size,
        "connections": connections,
        "gbps": round(median(edge, gbps), 3),
        "nginx_gbps": round(median(nginx, gbps), 3),
        "ratio": round(median(edge, gbps) / median(nginx, gbps), 3),
        "p50_ttfb_ms": round(median(edge, lambda one: one.ttfb(0.5)), 3),
        "nginx_p50_ttfb_ms": round(median(nginx, lambda one: one.ttfb(0.5)), 3),
        "p99_ttfb_ms": round(median(edge, lambda one: one.ttfb(0.99)), 3),
        "nginx_p99_ttfb_ms": round(median(nginx, lambda one: one.ttfb(0.99)), 3),
        "requests_per_s": round(median(edge, lambda one: one.requests / one.seconds)),
        "nginx_requests_per_s": round(median(nginx, lambda one: one.requests / one.seconds)),
        "spread_gbps": spreads(gbps),
        "spread_p99_ttfb_ms": spreads(lambda one: one.ttfb(0.99)),
    }
    tell(f"{block.size:,} bytes, {connections} connections: {row['gbps']} Gbit/s, nginx {row['nginx_gbps']}")
    return row


def _cold_misses(folder: Path, nginx: str, tell: Tell) -> dict[str, Any]:
    """What the first byte of a cold object takes through an edge before nginx, and from nginx itself."""
    objects = [write_object(folder / "origin", BLOCK_SEGMENTS, BLOCK_SEGMENT_BYTES) for _ in range(COLD_OBJECTS)]
    direct, through = [], []
    tell(f"cold misses: {COLD_OBJECTS} objects, each once")
    with launch_edge(origin=nginx, cache_dir=folder / "miss", log_level="warning") as edge:
        for one in objects:
            direct.append(run_load_here(_load(nginx, one, 1, 0.0)).ttfb(0.5))
            through.append(run_load_here(_load(edge.url, one, 1, 0.0)).ttfb(0.5))
    origin_ms, edge_ms = statistics.median(direct), statistics.median(through)
    tell(f"cold miss: first byte after {edge_ms:.2f} ms, of the origin itself {origin_ms:.2f} ms")
    return {
        "objects": COLD_OBJECTS,
        "origin_ttfb_ms": round(origin_ms, 3),
        "ttfb_ms": round(edge_ms, 3),
        "added_ms": round(edge_ms - origin_ms, 3),
        "spread_ms": {"edge": spread(through), "origin": spread(direct)},
    }


def _stampede(folder: Path, sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """Many clients at once on one large object that is not cached."""
    origin = folder / "stampede"
    tell(f"a stampede: {sizes.clients} clients on a cold object of {size(sizes.cold_bytes)}")
    large = write_object(origin, sizes.cold_bytes // COLD_SEGMENT_BYTES, COLD_SEGMENT_BYTES)
    with launch_edge(origin=str(origin), cache_dir=folder / "stampede-cache", log_level="warning") as edge:
        load = _load(edge.url, large, sizes.clients, 0.0, hashed=True)
        loaded = run_load(load)
        result = {
            "size": large.size,
            "clients": sizes.clients,
            "origin_fetches": _metric(edge.url, 'kvcdn_edge_origin_requests_total{operation="get"}'),
            "right_bodies": loaded.requests if loaded.hashes == [large.blake3] else 0,
            "seconds": round(loaded.seconds, 1),
            "p99_ttfb_ms": round(loaded.ttfb(0.99), 1),
            "peak_resident_bytes": edge.resident_bytes("VmHWM"),
        }
    tell(f"stampede: {result['origin_fetches']} fetches, {result['right_bodies']} right bodies in {result['seconds']} s")
    return result


def _slow_readers(folder: Path, sizes: Sizes, tell: Tell) -> dict[str, Any]:
    """Many readers that have begun a very large object and take nothing more of it."""
    origin, cache = folder / "slow", folder / "slow-cache"
    tell(f"slow readers: {sizes.readers} on an object of {size(sizes.slow_bytes)}")
    large = write_object(origin, sizes.slow_bytes // COLD_SEGMENT_BYTES, COLD_SEGMENT_BYTES)
    capacity = 2 * sizes.slow_bytes
    with launch_edge(origin=str(origin), cache_dir=cache, capacity=capacity, log_level="warning") as edge:
        run_load(_load(edge.url, large, 1, 0.0))
        before = edge.resident_bytes()
        with _reading_slowly(edge, large, sizes.readers) as begun:
            time.sleep(2.0)
            result = {
                "size": large.size,
                "readers": begun,
                "resident_bytes_before": before,
                "resident_bytes": edge.resident_bytes(),
                "peak_resident_bytes": edge.resident_bytes("VmHWM"),
            }
    shutil.rmtree(cache)
    shutil.rmtree(origin)
    tell(f"slow readers: {size(result['peak_resident_bytes'])} resident at most")
    return result


@contextlib.contextmanager
def _reading_slowly(edge: RunningEdge, large: BenchObject, readers: int) -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        for _ in range(readers):
            reader = stack.enter_context(socket.create_connection(("127.0.0.1", edge.port), timeout=60))
            reader.sendall(f"GET /{large.key} HTTP/1.1\r\nHost: slow\r\n\r\n".encode("ascii"))
            got = 0
            while got < SLOW_READ_BYTES:
                got += len(reader.recv(SLOW_READ_BYTES))
        yield readers


def _load(url: str, block: BenchObject, connections: int, seconds: float, *, hashed: bool = False) -> Load:
    parts = urlsplit(url)
    return Load(parts.hostname or "", parts.port or 0, [f"/{block.key}"], connections, seconds, hashed)


def _ask(url: str, block: BenchObject, connections: int, seconds: float) -> Loaded:
    return run_load(_load(url, block, connections, seconds))


def _metric(url: str, sample: str) -> int:
    with urlopen(f"{url}/metrics") as answer:  # noqa: S310 - our own edge on loopback
        for line in answer.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return int(float(value))
    return 0
