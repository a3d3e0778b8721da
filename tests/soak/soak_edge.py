"""A soak of the edge: mixed load, an origin of which a tenth of the answers is bad, and SIGKILL again and again (`make soak`).

At the end no reader was given a wrong byte, no file is left that the cache does not know, and the cap was never exceeded.
KVCDN_SOAK_SECONDS says how long (600), KVCDN_SOAK_KILL_SECONDS how often the edge is killed (30).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvcdn.edge.disk.storage import DiskCache
from kvcdn.edge.launch import RunningEdge
from kvcdn.stores.memory import MemoryStore
from support.blocks import make_document
from support.edge_process import connect, disk_bytes, metric, object_files, running_edge
from support.web import Answer, running_web

SECONDS = float(os.environ.get("KVCDN_SOAK_SECONDS", "600"))
KILL_SECONDS = float(os.environ.get("KVCDN_SOAK_KILL_SECONDS", "30"))

READERS = 10
CAPACITY = 24_000_000
"""Less than a third of what is published, so that objects come and go."""

FAULT_SHARE = 0.1


@dataclass
class Soak:
    """What the threads share."""

    objects: dict[str, bytes]
    tag: str
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    most_bytes: int = 0


def test_an_edge_survives(tmp_path: Path) -> None:
    """Minutes of everything at once."""
    documents = [make_document(tokens=1024 * 2, layers=8, heads=2, dim=64, seed=seed) for seed in range(100, 110)]
    documents += [make_document(tokens=700, seed=seed) for seed in range(110, 140)]
    store = MemoryStore()
    for document in documents:
        document.publish(store)
    soak = Soak({key: data for one in documents for key, data in one.objects.items()}, str(documents[0].model.tag))
    assert sum(map(len, soak.objects.values())) > 3 * CAPACITY
    faults = random.Random(7)
    with running_web(store) as web:
        web.bend = lambda answer: _bent(answer, faults)
        threads = [threading.Thread(target=_read, args=(soak, number)) for number in range(READERS)]
        threads.append(threading.Thread(target=_watch, args=(soak, tmp_path / "cache")))
        _run(soak, web.url, tmp_path / "cache", threads)
    _tell(soak)
    assert [] == soak.wrong
    assert 0 < soak.most_bytes <= CAPACITY
    for path in object_files(tmp_path / "cache"):
        assert path.read_bytes() in soak.objects.values()
    assert soak.seen["whole"] > 100


def _run(soak: Soak, origin: str, cache: Path, threads: list[threading.Thread]) -> None:
    """Edges one after the other on the same folder; each but the last is killed, and what it left is looked at."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with running_edge(origin, cache, capacity=CAPACITY, log_level="warning", scrub_bytes_per_second="5MB") as edge:
            soak.url = edge.url
            for thread in threads:
                if not thread.is_alive():
                    thread.start()
            time.sleep(max(min(KILL_SECONDS, end - time.monotonic()), 0.1))
            last = time.monotonic() >= end
            if last:
                soak.over.set()
                for thread in threads:
                    thread.join()
            _count(soak, edge)
            assert "Traceback" not in edge.log()
            if not last:
                soak.seen["killed"] += 1
                edge.process.kill()
                edge.process.wait()
        _look(cache)


def _look(cache: Path) -> None:
    """Nothing unfinished, and no file that the cache does not know."""
    taken = DiskCache(cache, CAPACITY)
    assert [] == list((cache / "staging").iterdir())
    known = {key[-64:] for key in taken.snapshot()}
    assert {path.name[:64] for path in object_files(cache)} <= known
    assert len(object_files(cache)) <= len(known)
    taken.close()


def _count(soak: Soak, edge: RunningEdge) -> None:
    for name in ("kvcdn_edge_fill_resumes_total", "kvcdn_edge_evictions_total", 'kvcdn_edge_fills_total{outcome="stored"}'):
        with contextlib.suppress(OSError):
            soak.seen[name] += int(metric(edge.url, name))


def _bent(answer: Answer, faults: random.Random) -> Answer:
    """Now and then an answer that is not what it should be."""
    if faults.random() >= FAULT_SHARE or answer.status not in (200, 206):
        return answer
    body, middle = answer.body, faults.randrange(max(len(answer.body), 1))
    whole = {**answer.headers, "Content-Length": str(len(body))}
    match faults.randrange(5):
        case 0:
            return Answer(503, {"Retry-After": "0"})
        case 1:
            return Answer(500)
        case 2:
            return replace(answer, headers=whole, body=body[:middle])
        case 3 if body:
            return replace(answer, body=body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :])
        case _:
            return Answer(200, {"ETag": '"other"'}, body[: middle // 2])


def _watch(soak: Soak, cache: Path) -> None:
    while not soak.over.wait(0.05):
        soak.most_bytes = max(soak.most_bytes, disk_bytes(cache))


def _read(soak: Soak, number: int) -> None:
    rng = random.Random(number)
    keys = list(soak.objects)
    while not soak.over.is_set():
        try:
            with contextlib.closing(connect(soak.url)) as connection:
                for _ in range(rng.randrange(1, 20)):
                    # Some are wanted more than others.
                    _ask(soak, connection, keys[int(len(keys) * rng.random() ** 2)], rng)
        except (OSError, http.client.HTTPException):
            soak.seen["cut"] += 1
            time.sleep(0.05)


def _ask(soak: Soak, connection: http.client.HTTPConnection, key: str, rng: random.Random) -> None:
    data = soak.objects[key]
    start, stop = 0, len(data)
    headers = {}
    kind = rng.choice(["whole", "whole", "range", "range", "head", "match", "leaves", "slow"])
    if kind == "match":
        address = key.rsplit("/", 1)[1]
        connection.request("POST", "/v1/match", body=json.dumps({"addresses": [address], "model": soak.tag}))
        connection.getresponse().read()
        soak.seen[kind] += 1
        return
    if kind == "range":
        start = rng.randrange(len(data))
        stop = rng.randrange(start, len(data)) + 1
        headers["Range"] = f"bytes={start}-{stop - 1}"
    connection.request("HEAD" if kind == "head" else "GET", f"/{key}", headers=headers)
    response = connection.getresponse()
    if response.status not in (200, 206):
        response.read()
        soak.seen[str(response.status)] += 1
        return
    announced, position = response.length, start
    for piece in _pieces(response, kind, rng):
        if piece != data[position : position + len(piece)] or position + len(piece) > stop:
            soak.wrong.append(f"{kind} of {key} at {position}")
        position += len(piece)
    if kind == "leaves":
        connection.close()
    elif kind != "head":
        # What the edge announced is the object's, whatever became of it then.
        if announced != stop - start:
            soak.wrong.append(f"{kind} of {key}: announced {announced} bytes of {stop - start}")
        if position != stop:
            raise http.client.IncompleteRead(b"", stop - position)
    soak.seen[kind] += 1


def _pieces(response: http.client.HTTPResponse, kind: str, rng: random.Random) -> Iterator[bytes]:
    leaves_after = rng.randrange(4)
    while piece := response.read(1 << 16):
        yield piece
        if kind == "slow":
            time.sleep(0.01)
        leaves_after -= 1
        if kind == "leaves" and leaves_after < 0:
            return


def _tell(soak: Soak) -> None:
    os.write(2, f"\n{json.dumps({'seconds': SECONDS, 'most_bytes': soak.most_bytes, **soak.seen})}\n".encode())
