"""Topologies and workloads as people write them: what is read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from pathlib import Path

import pytest

from kvcdn.economics.pricebook import PriceBook
from kvcdn.errors import UsageError
from kvcdn.simulation.presets import PRESETS
from kvcdn.simulation.topology import Edge, Origin, Publish, Readers, Region, read_topology
from kvcdn.simulation.workload import Zipf, read_requests

SAMPLE = Path(__file__).parents[1] / "infra" / "simulation.toml"


def test_sample_has_every_setting():
    """The commented sample is read, is known to the price book, and shows every key that there is."""
    text = SAMPLE.read_text("utf-8")
    read_topology(text, "sample").check(PriceBook.presets())
    shown = tomllib.loads(text.replace("# prefill_rate", "prefill_rate").replace("# gpu_hour_usd", "gpu_hour_usd"))
    for kind, table in (
        (Origin, shown["origin"]),
        (Publish, shown["publish"]),
        (Readers, shown["readers"]),
        (Region, shown["region"][0]),
        (Edge, shown["edge"][0]),
    ):
        assert {field.name for field in dataclasses.fields(kind)} == set(table)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_what_there_is(name):
    """Models, devices and prices of the presets are in the price book."""
    PRESETS[name].check(PriceBook.presets())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[edge]]\nname = 'a'\nspeed = 1", "speed is no setting"),
        ("[edge]\nname = 'a'", "two brackets"),
        ("[[edge]]\nmbit = 1", "name is missing"),
        ("[[edge]]\nname = 'a'\nmbit = '1'", "mbit must be a number"),
        ("[[edge]]\nname = 'a'\nmbit = nan", "mbit must be a number"),
        ("[[edge]]\nname = 'a'\nmbit = true", "mbit must be a number"),
        ("[[edge]]\nname = 'a'\nmbit = -1", "mbit must be a number 0 or more"),
        ("[[edge]]\nname = 'a'\nshare = 0", "shares"),
        ("[[edge]]\nname = 'a'\n[[edge]]\nname = 'a'", "name of its own"),
        ("[[edge]]\nname = 'a'\nregion = 'b'", "no region 'b'"),
        ("[[edge]]\nname = 'a'\npolicy = 'best'", "no policy 'best'"),
        ("[[edge]]\nname = 'a'\n[readers]\ndevices = 1.5", "devices must be a whole number"),
        ("[[edge]]\nname = 'a'\n[readers]\nmode = 'slow'", "no mode 'slow'"),
        ("[[edge]]\nname = 'a'\n[readers]\nutilisation = 2", "utilisation"),
        ("[[edge]]\nname = 'a'\n[links]\n", "no such table or key as links"),
        ("edge = 5", "two brackets"),
        ("edge = [5]", "not a table"),
        ("[origin]\n", r"no \[\[edge\]\]"),
        ("no toml", "own.toml"),
    ],
)
def test_what_is_no_topology_is_refused(text, told):
    """With the file, the table and the key."""
    with pytest.raises(UsageError, match=told):
        read_topology(text, "own.toml")


@pytest.mark.parametrize(
    ("table", "key", "value"), [("readers", "model", "gpt-9"), ("readers", "device", "abacus"), ("origin", "store", "cellar")]
)
def test_unknown_names_are_refused(table, key, value):
    """Models, devices and prices are those of the price book."""
    found = read_topology(f"[[edge]]\nname = 'a'\n[{table}]\n{key} = '{value}'", "own.toml")
    with pytest.raises(UsageError, match=f"no {key} '{value}'"):
        found.check(PriceBook.presets())


def test_a_setting_is_varied_in_all_edges():
    """--vary changes one key of every edge; keys and values are checked as in a file."""
    found = PRESETS["laptops"].varied("edge.capacity_gb", "12.5")
    assert [12.5] * 3 == [edge.capacity_gb for edge in found.edges]
    assert "lru" == PRESETS["cluster"].varied("edge.policy", "lru").edges[0].policy
    assert math.inf == PRESETS["cluster"].varied("edge.mbit", "inf").edges[0].mbit
    for key, value in (("edge.speed", "1"), ("link.mbit", "1"), ("edge.mbit", "fast"), ("edge", "1")):
        with pytest.raises(UsageError):
            PRESETS["cluster"].varied(key, value)


def line(**values):
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2], **values}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"no",
        b"{}",
        line(hash_ids=[1, 1]),
        line(hash_ids=[1, "2"]),
        line(hash_ids=5),
        line(timestamp="now"),
        line(timestamp=-1),
        line(input_length=512),
        line(input_length=1025),
        line(input_length=1.5),
    ],
)
def test_what_is_no_request_is_refused(text):
    """With the number of the line."""
    with pytest.raises(UsageError, match="line 2"):
        read_requests([line(), text], "trace", [1], 1.0, 0)


def test_a_trace_is_read():
    """Times in seconds from its first request on, faster where that is asked for; prompts without a block are left out."""
    lines = [line(timestamp=3000), line(timestamp=5000, hash_ids=[], input_length=0), line(timestamp=7000, hash_ids=[1, 3])]
    found = read_requests(lines, "trace", [1], 2.0, 0)
    assert [(0.0, 600, (1, 2), 600, 0), (2.0, 600, (1, 3), 600, 0)] == found
    with pytest.raises(UsageError, match="no request"):
        read_requests([], "trace", [1], 1.0, 0)


def test_a_conversation_stays_where_it_is():
    """A prompt that goes on where another ended goes to the same edge; that both begin with one system prompt is no reason."""
    lines = []
    for number in range(60):
        first = [0, 1000 + number, 2000 + number]
        lines.append(line(timestamp=1000 * number, input_length=1500, hash_ids=first))
        longer = [*first[:2], 3000 + number, 4000 + number]
        lines.append(line(timestamp=1000 * number + 500, input_length=2048, hash_ids=longer))
    found = read_requests(lines, "trace", [1, 1, 2], 1.0, 7)
    assert all(before.edge == after.edge for before, after in zip(found[::2], found[1::2], strict=True))
    assert {0, 1, 2} == {request.edge for request in found}


def test_zipf_is_drawn_as_said():
    """Popularity, rate, edges and lengths are those asked for, and the same seed draws the same."""
    zipf = Zipf(requests=50_000, seconds=1000, documents=10, exponent=1.0, document_tokens=1000, question_tokens=8)
    found = list(zipf.draw(50_000, [3, 1], 1))
    share = [sum(request.chain[0] == 2 * number for request in found) / 50_000 for number in range(10)]
    total = sum(1 / place for place in range(1, 11))
    assert [pytest.approx(1 / place / total, rel=0.1) for place in range(1, 11)] == share
    assert 1000 == pytest.approx(found[-1].time, rel=0.02)
    assert 0.25 == pytest.approx(sum(request.edge for request in found) / 50_000, rel=0.05)
    assert {(1008, 2, 1000)} == {(request.tokens, len(request.chain), request.covered) for request in found}
    assert found[:100] == list(zipf.draw(50_000, [3, 1], 1))[:100]
