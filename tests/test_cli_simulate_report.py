"""docs/simulation.md: its tables are what the code makes of no trace, or of what came of the traces.

Where KVCDN_TRACES names the folder of the traces, what came of them is simulated anew as well.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path

import pytest

from kvcdn.cli.simulate_plot import draw
from kvcdn.cli.simulate_report import (
    CHECK_RECORD,
    PLOTS,
    RECORD,
    Recording,
    check_sections,
    drawn_sections,
    inputs,
    recorded,
    sections,
)
from kvcdn.errors import UsageError

DOCUMENT = Path(__file__).parents[1] / "docs" / "simulation.md"

FOLDER = os.environ.get("KVCDN_TRACES")


def nothing(doing, count):
    """No progress is shown."""


@cache
def shown(name):
    """The table in the committed document."""
    return re.search(rf"<!-- table: {name} -->\n\n(.*?)\n\n<!-- end -->", DOCUMENT.read_text("utf-8"), re.DOTALL)[1]


def rows(name):
    """Its rows, as cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown(name).splitlines()[2:]]


@pytest.mark.parametrize("name", drawn_sections(nothing))
def test_drawn_tables_are_what_the_code_makes(name):
    """After a change of a price, a model or the simulation: kvcdn simulate --report docs/simulation.md --trace FOLDER."""
    assert shown(name) == drawn_sections(nothing)[name]()


def record():
    return DOCUMENT.with_name(RECORD).read_text("utf-8")


@pytest.mark.parametrize("name", ["traces", "memory", "capacity"])
def test_tables_of_traces_are_what_comes_of_the_record(name):
    """No cell was written by hand, and none is older than the others."""
    assert shown(name) == sections(recorded(record()), nothing)[name]()


def test_the_record_is_of_todays_inputs():
    """After a change of the preset, a price or a model: kvcdn simulate --report docs/simulation.md --trace FOLDER."""
    assert inputs() == json.loads(record())["inputs"]


def test_the_table_of_the_check_is_what_the_check_told():
    """With its machine, and whether something else ran there: kvcdn simulate --check --report docs/simulation.md."""
    found = json.loads(DOCUMENT.with_name(CHECK_RECORD).read_text("utf-8"))
    assert shown("check") == check_sections(found)["check"]()
    assert found["machine"]["cpu"] in shown("check")


@pytest.mark.skipif(not FOLDER, reason="KVCDN_TRACES names no folder of traces")
@pytest.mark.parametrize("name", ["traces", "memory"])
def test_the_record_is_what_the_code_makes_of_the_traces(name):
    """Which are not part of the project."""
    runs = Recording(Path(FOLDER), nothing)
    assert shown(name) == sections(runs, nothing)[name]()
    kept = json.loads(record())["runs"]
    assert runs.kept == {key: kept[key] for key in runs.kept}


def test_every_table_is_in_the_document_once():
    """What can be generated is shown, and nothing twice; so are the plots."""
    text = DOCUMENT.read_text("utf-8")
    assert sorted(("check", *sections(recorded(record()), nothing))) == sorted(
        re.findall(r"^<!-- table: (\S+) -->$", text, re.MULTILINE)
    )
    for name in PLOTS.values():
        assert f"({name})" in text
        assert (DOCUMENT.parent / name).stat().st_size < 100_000


def share(cell):
    return float(cell.removesuffix("%")) / 100


def test_the_window_is_as_near_as_the_page_says():
    """To two points of hits and 3 % of egress of LRU, prompt by prompt; and it counts more egress than kvcdn's eviction has."""
    lru, own, window = rows("method")
    for exact, near in zip(lru[1:4], window[1:4], strict=True):
        assert share(exact) == pytest.approx(share(near), abs=0.02)
    sent = [float(row[4].removesuffix(" GB").replace(",", "")) for row in (lru, own, window)]
    assert sent[0] == pytest.approx(sent[2], rel=0.03)
    assert sent[1] < sent[2]


def test_a_plot_is_drawn(tmp_path):
    """To an SVG that is the same at each run; other kinds of files are refused."""
    pytest.importorskip("matplotlib")
    run = {
        "set": "",
        **{name: {"first_token_quantiles_s": [0.1 * step for step in range(101)]} for name in ("with", "without")},
    }
    result = {"traffic": "a trace", "topology": "cluster", "runs": [run]}
    for name in ("one.svg", "two.svg"):
        draw(result, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    with pytest.raises(UsageError, match=r"plot\.pdf"):
        draw(result, tmp_path / "plot.pdf")
