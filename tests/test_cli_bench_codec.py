"""`kvcdn bench codec`: a row for every precision of a real text, with a real if tiny model."""

from __future__ import annotations

import pytest

from kvcdn.cli.bench.codec import PUBLISHED
from kvcdn.cli.bench.codec_plot import draw_codecs
from kvcdn.errors import UsageError
from kvcdn.keys import LOSSY, TRANSFORMED
from support.benched import check_benched
from support.command import kvcdn
from support.tiny import TEXT


def test_rows_of_every_precision(tiny_llama, tmp_path):
    """Ratios fall with the precision, exact KV is at no distance, and what was published by others is marked so."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, "utf-8")
    ran = kvcdn("bench", "codec", "--model", tiny_llama, "--document", text, "--tokens", "300", "--runs", "1", "--json")
    rows = {row["codec"]: row for row in check_benched("codec", ran)["rows"]}
    others = ["safetensors (raw)", "zstd over raw bytes", "int8 over whole tensors"]
    assert [*others, "lossless", *LOSSY] == list(rows)
    assert (0.0, 1.0) == (rows["lossless"]["kl"], rows["lossless"]["top1"])
    assert rows["safetensors (raw)"]["ratio"] == 1.0
    assert rows["lossless"]["ratio"] > rows["int8"]["ratio"] > rows["int4"]["ratio"]
    ratios = [rows[name]["ratio"] for name in ("lossless", *TRANSFORMED)]
    assert ratios == sorted(set(ratios), reverse=True)
    for name in ("lossless", *LOSSY):
        assert {"document", "encode_gbps", "decode_gbps_per_core", "kl_recompute", "greedy_equal"} <= set(rows[name])
    assert {"CacheGen", "KVTC"} == {one["codec"] for one in ran.json["published"] if "arXiv" in one["published"]}


def test_a_short_document_is_refused(tiny_llama, tmp_path):
    """There must be a tail to compare on."""
    text = tmp_path / "short.txt"
    text.write_text("Too short.", "utf-8")
    ran = kvcdn("bench", "codec", "--model", tiny_llama, "--document", text, "--tokens", "300")
    assert 2 == ran.code
    assert "556 are needed" in ran.complaint


def test_the_plot_shows_every_lossy_codec(tmp_path):
    """Each document's curve and points, what is exact beside them, and what others published said to be theirs."""
    pytest.importorskip("matplotlib")
    lossy = {"kl": 0.002, "kl_recompute": 0.001}
    rows = [{"document": "text", "codec": name, "ratio": 0.1 * at, **lossy} for at, name in enumerate(LOSSY, 1)]
    rows += [{"document": "text", "codec": "lossless", "ratio": 0.67, "kl": 0.0, "kl_recompute": 0.001}]
    draw_codecs(rows, PUBLISHED, tmp_path / "plot.svg")
    again = tmp_path / "again.svg"
    draw_codecs(rows, PUBLISHED, again)
    assert again.read_bytes() == (tmp_path / "plot.svg").read_bytes()
    draw_codecs(rows[:-2], PUBLISHED, again)
    assert again.read_bytes() != (tmp_path / "plot.svg").read_bytes()
    drawn = (tmp_path / "plot.svg").read_text("utf-8")
    found = [text for text in ("as published", ": CacheGen", ": KVTC", "lossless, exact", *LOSSY) if text not in drawn]
    assert [] == found
    with pytest.raises(UsageError, match=r"not 'plot\.pdf'"):
        draw_codecs(rows, PUBLISHED, tmp_path / "plot.pdf")
