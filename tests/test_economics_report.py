"""docs/economics.md: its tables are what the code makes, and what a hand makes of the cited inputs."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pytest

from kvcdn.economics.report import PLOTS, SECTIONS, case, fill
from kvcdn.errors import UsageError

ROOT = Path(__file__).parents[1]

DOCUMENT = ROOT / "docs" / "economics.md"

TOKENS, QUESTION = 32_768, 32

H100, H100_USD, RTX_4090 = 989.4e12 * 0.4, 3.99 / 3600, 165.2e12 * 0.4
"""Dense bfloat16 peak at 40 %, the rental price a second."""

CASES = {
    # KV bytes of the document, active parameters, layers x heads x dimension that see all, that see a window, window, H100s
    "qwen3-4b": (147_456 * TOKENS, 4.02e9, 36 * 32 * 128, 0, 1, 1),
    "llama-3.1-70b": (327_680 * TOKENS, 70.6e9, 80 * 64 * 128, 0, 1, 4),
    "glm-4.6": (376_832 * TOKENS, 32e9, 92 * 96 * 128, 0, 1, 16),
    "gpt-oss-120b": (36_864 * TOKENS + 36_864 * 128, 5.1e9, 18 * 64 * 64, 18 * 64 * 64, 128, 1),
    "gemma-3-27b": (81_920 * TOKENS + 425_984 * 1024, 27.0e9, 10 * 32 * 128, 52 * 32 * 128, 1024, 1),
    "qwen3.6-27b": (65_536 * TOKENS + 75.5e6, 27e9, 16 * 24 * 256, 0, 1, 1),
    "deepseek-v3": (70_272 * TOKENS, 37e9, 61 * 128 * 160, 0, 1, 16),
}
"""Inputs of some rows, written down apart from the code, from the checkpoints' configurations and the models' cards."""


@cache
def document():
    return DOCUMENT.read_text("utf-8")


@cache
def table(name):
    """The rows of a table in the committed document, by their first cell."""
    part = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", document(), re.DOTALL)[1]
    rows = [
        [cell.strip().strip("*`") for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows[2:]}


def value(cell):
    """The number in a cell, in bytes a second, dollars or whatever its unit stands for."""
    match = re.fullmatch(r"(-?)\$?([\d.,e+-]+) ?([MGT]?)(bit/s|B/s)?(?: x)?", cell)
    scale = {"": 1.0, "M": 1e6, "G": 1e9, "T": 1e12}[match[3]]
    return float(match[2].replace(",", "")) * scale / (8 if match[4] == "bit/s" else 1)


def compute(name, tokens):
    """FLOPs of a prefill, summed as the page says."""
    _, active, full, windowed, window, _ = CASES[name]
    pairs = tokens * (tokens + 1) / 2
    near = window * (window + 1) / 2 + (tokens - window) * window
    return 2 * active * tokens + 4 * full * pairs + 4 * windowed * near


def test_document_is_what_the_code_makes():
    """`kvcdn economics --report docs/economics.md` would change nothing: after a change of a price, run it."""
    assert document() == fill(document())


def test_every_table_is_in_the_document_once():
    """What can be generated is shown, and nothing twice."""
    assert sorted(SECTIONS) == sorted(re.findall(r"^<!-- table: (\S+) -->$", document(), re.MULTILINE))


@pytest.mark.parametrize("name", CASES)
def test_needs_by_hand(name):
    """KV a token, prefill rate, link and opening speed of the big table, from the cited inputs."""
    kv, *_, count = CASES[name]
    _, per_token, devices, rate, link, opening = table("needs")[name]
    seconds = compute(name, TOKENS) / (H100 * count)
    assert round(kv / TOKENS) == value(per_token)
    assert count == value(devices)
    assert value(rate) == pytest.approx(TOKENS / seconds, rel=1e-4)
    assert value(link) == pytest.approx(kv * 0.67 / seconds, rel=5e-3)
    assert value(opening) == pytest.approx(kv / seconds, rel=5e-3)


@pytest.mark.parametrize("name", CASES)
def test_reads_by_hand(name):
    """The price of a read, of publishing and of a month, the reads to break even and the months, from R2's list prices."""
    kv, active, *_, count = CASES[name]
    price = count * H100_USD
    without, reuse, publish, month, reads, months = map(value, table("reads")[name])
    prefill = compute(name, TOKENS) / (H100 * count)
    both = compute(name, TOKENS + QUESTION) / (H100 * count)
    block = min(max(2 ** math.floor(math.log2(2**24 / (kv / TOKENS))), 64), 1024)
    blocks = math.ceil(TOKENS / block)
    requests = blocks * math.ceil(kv * 0.67 / blocks / 2**23) + 1
    held = {"qwen3-4b": 8.04e9, "llama-3.1-70b": 141.2e9, "glm-4.6": 710e9, "gpt-oss-120b": 60.8 * 2**30,
            "gemma-3-27b": 54e9, "qwen3.6-27b": 54e9, "deepseek-v3": 671e9}[name]  # fmt: skip
    total = {"glm-4.6": 355e9, "gpt-oss-120b": 116.8e9, "deepseek-v3": 671e9}.get(name, active)
    question = (held * min(1, 32 * active / total) + kv) / (3.35e12 * count)
    assert without == pytest.approx(both * price, rel=0.05)
    read = question * price + requests * 0.36e-6
    assert reuse == pytest.approx(read, rel=0.06)
    assert publish == pytest.approx(prefill * price + (blocks + 1) * 4.5e-6, rel=0.05)
    stored = kv * 0.67 / 1e9 * 0.015
    assert month == pytest.approx(stored, rel=0.05)
    fixed = prefill * price + (blocks + 1) * 4.5e-6 + stored * 30 / (365 / 12)
    assert reads == math.ceil(fixed / (both * price - read))
    assert months == pytest.approx((1000 * (both * price - read) - prefill * price - (blocks + 1) * 4.5e-6) / stored, rel=6e-3)


def test_paper_by_hand():
    """The published figures, and each correction, from four multiplications."""
    rows = table("paper")
    assert ["$1.51 M", "$30,377", "49.7 x", "yes"] == rows["as published"]
    prefill = 80e6 * 3774 * 5 / 1e6
    reuse = prefill * 0.296 / 14.71
    gb = 3774 * 147_456 / 1e9
    s3 = 80e6 * (gb * 0.09 + 60 * 0.4e-6)
    assert value(rows["delivered from S3 over the internet, $0.09/GB"][2]) == pytest.approx(prefill / (reuse + s3), rel=5e-3)
    gpu = 80e6 * (2 * 4.02e9 * 3774 + 4 * 36 * 32 * 128 * 3774 * 3775 / 2) / H100 * 12.29 / 3600
    azure = "prefill on an H100 at $12.29/h (Azure), delivered from R2 without egress fee, read"
    r2, pieces = rows[f"{azure} by whole blocks"], rows[f"{azure} in pieces of 1 MiB"]
    assert value(r2[0]) == pytest.approx(gpu, rel=1e-3)
    assert value(r2[1]) == pytest.approx(gpu * 0.296 / 14.71 + 80e6 * 60 * 0.36e-6, rel=1e-3)
    asked = 59 * math.ceil(gb * 1e9 / 59 / 2**20) + 1
    assert value(pieces[1]) == pytest.approx(gpu * 0.296 / 14.71 + 80e6 * asked * 0.36e-6, rel=1e-3)


@pytest.mark.parametrize(("name", "link", "round_trip"), [("gemma-3-27b", 25e9 / 8, 0.001), ("qwen3.6-27b", 1e9 / 8, 0.01)])
def test_faster_from_by_hand(name, link, round_trip):
    """At the length in the table reuse is faster, a token earlier it is not."""
    column = {25e9 / 8: 1, 1e9 / 8: 2}[link]
    found = int(value(table("faster-h100")[name][column]))
    _, active, *_ = CASES[name]
    ahead = []
    for tokens in (found - 1, found):
        size = {"gemma-3-27b": 81_920 * tokens + 425_984 * min(tokens, 1024), "qwen3.6-27b": 65_536 * tokens + 75.5e6}[name]
        miss = compute(name, tokens + QUESTION) / H100
        question = (2 * active + size) / 3.35e12
        question = max(question, (compute(name, tokens + QUESTION) - compute(name, tokens)) / H100)
        # Requests of 1 MiB over eight connections wait for less than the link here: their round trips hide behind it.
        assert size * 0.67 / 2**20 / 8 * round_trip < size * 0.67 / link
        ahead.append(4 * round_trip + max(size * 0.67 / link, size / 2.4e9) + question < miss)
    assert [False, True] == ahead


def test_prose_quotes_the_tables():
    """Figures that stand in sentences are those of the tables beside them."""
    text = document()
    sensitivity = [value(row[-1]) for row in table("sensitivity").values()]
    assert min(sensitivity) > 100  # "each by a factor of over a hundred"
    cheaper = table("cheaper")
    assert ["deepseek-v3"] == [name for name, row in cheaper.items() if row[0] != "never"]  # "every model below but one"
    assert value(cheaper["deepseek-v3"][0]) > 500_000
    expanded = cheaper.pop("deepseek-v3-expanded")
    for column in (3, 5):  # "from 90 to 1,600 tokens on, by model"
        assert all(90 <= value(row[column]) <= 1600 for row in cheaper.values())
        assert value(expanded[column]) <= 8400
    assert ("23,000", "160") == tuple(f"{round(value(cheaper['qwen3-4b'][i]), d):,.0f}" for i, d in ((4, -3), (5, -1)))
    cadence = {name: row for name, row in table("cadence").items() if name != "deepseek-v3-expanded"}
    longest = max(float(row[2].removesuffix(" hours")) for row in cadence.values())
    assert math.ceil(longest) == 8  # "every eight hours"
    assert max(value(row[2]) for row in table("faster-m1-pro").values()) <= 3000
    times = table("first-token")["qwen3-4b"]
    assert "5" == f"{float(times[1].split()[0]) / float(times[4].split()[0]):.0f}"  # at 8,192 tokens in an office
    assert min(value(row[4]) for row in table("needs").values()) * 8 > 2e9
    sparse, dense = (value(table("faster-h100")[name][0]) for name in ("deepseek-v3.2", "deepseek-v3"))
    assert 6 == round(sparse / dense)  # "six times as long"
    r2 = [value(row[2]) for name, row in table("paper").items() if "H100" in name and "whole blocks" in name and "R2" in name]
    assert [3, 11] == sorted(round(ratio) for ratio in r2)
    assert "(60 a read by whole blocks)" in text.replace("\n", " ")


def test_unknown_markers_are_refused():
    """A marker that names no table, or a document without any, is one clear sentence."""
    with pytest.raises(UsageError, match="'nonsense'"):
        fill("<!-- table: nonsense -->\n<!-- end -->\n")
    with pytest.raises(UsageError, match="no marker"):
        fill("# Nothing\n")


def test_only_tables_are_touched():
    """What stands between the tables stays to the letter."""
    text = "# A\n\n<!-- table: tariffs -->\nold\n<!-- end -->\n\nwords | of | mine\n"
    renewed = fill(text)
    assert renewed.startswith("# A\n\n<!-- table: tariffs -->\n\n| preset |")
    assert renewed.endswith("|\n\n<!-- end -->\n\nwords | of | mine\n")
    assert renewed == fill(renewed)


@pytest.mark.parametrize("name", PLOTS)
def test_plots_are_what_the_code_draws(name, tmp_path):
    """Each is shown in the document; drawn again, by the same version of matplotlib, it is the same file."""
    mpl = pytest.importorskip("matplotlib")
    from kvcdn.cli.economics_plot import draw

    assert f"({name})" in document()
    committed = (DOCUMENT.parent / name).read_text("utf-8")
    assert len(committed) < 100_000
    if f"Matplotlib v{mpl.__version__}," not in committed:
        pytest.skip("drawn by another version of matplotlib")
    model, device, link = PLOTS[name]
    draw(case(model, device, link), tmp_path / name)
    assert committed == (tmp_path / name).read_text("utf-8")
