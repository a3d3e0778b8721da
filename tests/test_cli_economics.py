"""`kvcdn economics`: its JSON, its tables, its refusals, its map, and how little it loads."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvcdn.economics.pricebook import PriceBook
from kvcdn.errors import UsageError
from support.command import kvcdn
from support.waiting import PROCESS_SECONDS

ROOT = Path(__file__).parents[1]

HEAVY = {"torch", "numpy", "blosc2", "transformers", "safetensors", "matplotlib"}

OFFLINE = """
import atexit, socket, sys

def refuse(*_, **__):
    raise AssertionError("the economics talks to nobody")

socket.socket.connect = socket.getaddrinfo = refuse
atexit.register(lambda: print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr))
from kvcdn.cli.main import run
run()
"""


def economics(*arguments):
    ran = kvcdn("economics", *arguments, "--json")
    assert 0 == ran.code, ran.err
    return ran.json


@pytest.mark.parametrize("arguments", [["--help"], ["--json"], ["--preset", "paper"], ["--preset", "paper", "--json"], []])
def test_it_loads_nothing_heavy_and_stays_offline(arguments):
    """Neither its help nor a run imports torch, any other heavy library, or opens a connection."""
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, "economics", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_SECONDS,
    )
    assert 0 == done.returncode, done.stderr
    loaded = set(done.stderr.split())
    assert "kvcdn" in loaded
    assert set() == loaded & HEAVY


def test_the_papers_case():
    """$1.5 M against $0.03 M, 49.7 x; which assumptions carry it, and what real prices make of it."""
    found = economics("--preset", "paper")
    assert (1_509_600.0, 30_376.72, 49.7) == (found["reprefill_usd"], found["reuse_usd"], found["ratio"])
    taken = {name: entry["value"] for name, entry in found["assumptions"].items()}
    assert (3774, 80_000_000, 5.0, 14.71, 0.296, 0) == tuple(
        taken[name] for name in ("tokens", "reads", "tariff_usd_per_million", "prefill_s", "reuse_s", "bytes_moved")
    )
    assert all(entry["source"] for entry in found["assumptions"].values())
    by_change = {row["changed"]: row for row in found["corrections"]}
    assert not by_change["delivered from S3 over the internet, $0.09/GB"]["pays"]
    assert all(entry["ratio_moves_by"] > 100 for entry in found["carried_by"])
    for row in found["corrections"]:
        assert row["pays"] == (row["reprefill_usd"] > row["reuse_usd"])
    shown = kvcdn("economics", "--preset", "paper")
    assert "do not" in shown.out
    assert "49.7 x" in shown.out


def test_defaults_are_said_with_their_sources():
    """Every assumption has a value and a source; all that is preset has a date as well."""
    found = economics()
    assert {"time": False, "gpu": True, "api": True, "api-cached": True} == found["pays"]
    assumed = found["assumptions"]
    assert all(entry["source"] for entry in assumed.values())
    for name in ("model", "stored_ratio", "egress_usd_per_gb", "edge_egress_usd_per_gb", "input_usd_per_million"):
        assert assumed[name]["date"].startswith("2026-")
    assert "do not" in found["verdict"]["time"]
    assert "RunPod" in assumed["gpu_hour_usd"]["source"]
    assert "given" in economics("--gpu-hour", "2")["assumptions"]["gpu_hour_usd"]["source"]


def test_a_laptop_at_home_gains_and_a_server_there_does_not():
    """The same model and link, two devices: the verdict turns."""
    laptop = economics("--device", "m1-pro", "--link", "home")
    server = economics("--device", "h100", "--link", "home")
    assert (True, False) == (laptop["pays"]["time"], server["pays"]["time"])
    assert laptop["latency"]["prefill_tokens_per_s"] == pytest.approx(3774 / 14.71, rel=1e-4)


@pytest.mark.parametrize(
    ("option", "field", "expected"),
    [
        (["--egress-usd", "0.5"], "egress_usd_per_gb", 0.5),
        (["--storage-usd", "0.5"], "storage_usd_per_gb_month", 0.5),
        (["--request-usd", "0.5"], "read_usd_per_1000", 0.5),
        (["--write-usd", "0.5"], "write_usd_per_1000", 0.5),
        (["--edge-usd", "0.5"], "edge_egress_usd_per_gb", 0.5),
        (["--input-usd", "0.5"], "input_usd_per_million", 0.5),
        (["--cached-usd", "0.5"], "cached_usd_per_million", 0.5),
        (["--gpu-hour", "0.5"], "gpu_hour_usd", 0.5),
        (["--gpu-hour", "0.5", "--devices", "3"], "gpu_hour_usd", 1.5),
        (["--hit-ratio", "0.5"], "hit_ratio", 0.5),
        (["--stored-ratio", "0.5"], "stored_ratio", 0.5),
        (["--precision", "int4"], "stored_ratio", 0.29),
        (["--precision", "tc-least"], "stored_ratio", 0.084),
        (["--rtt", "0.5"], "round_trip", 0.5),
        (["--link", "8Mbit/s"], "link", 1e6),
        (["--link", "2.5GB/s"], "link", 2.5e9),
        (["--open-rate", "5e8"], "open_rate", 5e8),
        (["--request-bytes", "5e6"], "request_bytes", 5e6),
        (["--parameters", "1e9"], "active_parameters", 1e9),
        (["--utilisation", "0.5"], "flops", 989.4e12 * 0.5),
        (["--retrain-days", "7"], "retrain_days", 7.0),
        (["--question-tokens", "7"], "question_tokens", 7),
        (["--days", "7"], "days", 7.0),
        (["--reads", "7"], "reads", 7.0),
        (["--gpu-waits"], "gpu_waits", True),
        (["--store", "b2"], "egress_usd_per_gb", 0.01),
        (["--delivery", "fastly"], "edge_egress_usd_per_gb", 0.12),
        (["--tariff", "gpt-5.6"], "input_usd_per_million", 4.0),
        (["--link", "rack"], "link", 12.5e9),
    ],
)
def test_an_option_reaches_the_assumption(option, field, expected):
    """Each number that can be given is the one that is computed with."""
    assert expected == pytest.approx(economics(*option)["assumptions"][field]["value"])


def test_own_prices_come_from_a_file():
    """The commented sample is loaded, and every entry of it can be used by name."""
    sample = ROOT / "infra" / "prices.toml"
    names = [f"--{kind}={name}" for kind, entries in tomllib.loads(sample.read_text("utf-8")).items() for name in entries]
    assert ["--delivery=mine", "--device=mine", "--store=mine", "--tariff=mine"] == sorted(names)
    assumed = economics("--prices", sample, *names)["assumptions"]
    assert (0.05, "our contract", "2026-11-01") == tuple(
        assumed["egress_usd_per_gb"][key] for key in ("value", "source", "date")
    )
    assert (0.02, 2.5, 2.2) == tuple(
        assumed[name]["value"] for name in ("edge_egress_usd_per_gb", "input_usd_per_million", "gpu_hour_usd")
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[store.x", "Expected"),
        ("[shop.x]\na = 1", "no such table as [shop]"),
        ("store = 3", "[store] holds tables"),
        ("[tariff.x]\ninput_usd_per_million = 1", "cached_usd_per_million is missing"),
        ("[delivery.x]\negress_usd_per_gb = 'a'", "must be a number"),
        ("[delivery.x]\negress_usd_per_gb = true", "must be a number"),
        ("[delivery.x]\negress_usd_per_gb = nan", "must be a number 0 or more"),
        ("[delivery.x]\negress_usd_per_gb = -1", "must be a number 0 or more"),
        ("[delivery.x]\negress_usd_per_gb = 1\nsource = 3", "source must be a string"),
        ("[delivery.x]\negress_usd_per_gb = 1\nspeed = 3", "speed is no setting"),
        ("[device.x]\nusd_per_hour = 1", "peak_flops is missing"),
        ("[device.x]\nusd_per_hour = 1\npeak_flops = 0", "must be a number above 0"),
    ],
)
def test_bad_price_files_are_told_in_a_sentence(text, words):
    """Which file, which entry, and what is wrong with it."""
    with pytest.raises(UsageError) as caught:
        PriceBook.presets().with_toml(text, "mine.toml")
    assert str(caught.value).startswith("mine.toml: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "--tokens 0", "--tokens -5", "--tokens 99999999999", "--question-tokens 0", "--reads nan", "--reads 0",
        "--reads inf", "--days 0", "--hit-ratio 1.5", "--hit-ratio nan", "--model nope", "--preset nope",
        "--preset paper --tokens 5", "--utilisation 0", "--utilisation 1.1", "--link 5", "--link 0Mbit/s",
        "--link -3Mbit/s", "--kv-bytes-per-token 1000", "--kv-bytes-per-token nan --parameters 1e9",
        "--kv-bytes-per-token -1 --prefill-rate 10", "--parameters 0", "--request-bytes 0", "--request-bytes nan",
        "--gpu-hour -1", "--gpu-hour nan", "--egress-usd inf", "--storage-usd -1", "--device x", "--store x", "--tariff x",
        "--delivery x", "--precision x", "--stored-ratio 0", "--rtt nan", "--rtt 1e9", "--retrain-days 0", "--devices 0",
        "--zero-egress s3", "--zero-egress x", "--write-usd -1", "--plot map.pdf", "--open-rate 0", "--prefill-rate 0",
        "--prefill-rate inf", "--input-usd -2",
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(words):
    """Exit code 2, one line and perhaps a hint, and with --json the same as one object."""
    ran = kvcdn("economics", *words.split(), "--json")
    assert 2 == ran.code, ran.err
    assert 2 == ran.json["exit_code"]
    lines = ran.complaint.splitlines()
    assert 1 <= len(lines) <= 2
    assert lines[0].startswith("kvcdn: ")


def test_a_config_folder_is_a_model(tmp_path):
    """Sizes come from config.json; a folder without one, or with another thing in it, is told."""
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config |= {"num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    assert 3 == kvcdn("economics", "--model", folder).code
    (folder / "config.json").write_text(json.dumps(config))
    ours, known = economics("--model", folder), economics("--model", "llama-3.1-8b")
    assert ("checkpoint", known["sizes"]) == (ours["model"], ours["sizes"])
    assert ours["latency"]["prefill_ttft_s"] == pytest.approx(known["latency"]["prefill_ttft_s"], rel=0.01)
    for bad in ("[]", "{", "\x00", json.dumps({**config, "num_hidden_layers": -1})):
        (folder / "config.json").write_text(bad)
        assert 2 == kvcdn("economics", "--model", folder).code


def test_a_hub_id_is_a_model(tmp_path, monkeypatch):
    """One that has an alias is known; of another, the hub's cache may hold the configuration; nothing is downloaded."""
    assert "qwen3-8b" == economics("--model", "Qwen/Qwen3-8B")["model"]
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused = kvcdn("economics", "--model", "someone/something")
    assert (2, True) == (refused.code, "hf download someone/something config.json" in refused.complaint)
    snapshot = tmp_path / "models--someone--something" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--someone--something" / "refs").mkdir()
    (tmp_path / "models--someone--something" / "refs" / "main").write_text("0" * 40)
    config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    (snapshot / "config.json").write_text(json.dumps(config))
    assert 2 * 2 * 64 * 2 * 3774 == economics("--model", "someone/something")["sizes"]["raw_bytes"]


def test_kv_size_alone_is_a_model_with_a_rate():
    """Nothing known but bytes and a rate: prefill is linear, and so is everything else."""
    found = economics("--kv-bytes-per-token", "100000", "--prefill-rate", "500", "--tokens", "1000")
    assert 100_000_000 == found["sizes"]["raw_bytes"]
    assert 1.032 * 2 == pytest.approx(found["latency"]["prefill_ttft_s"])
    assert 100_000 * 500 * 0.67 == pytest.approx(found["break_even"]["link_bytes_per_s_formula"])


@pytest.mark.parametrize(
    "measured",
    [
        {"tokens": 9000, "measured_tokens": 1024, "tokens_per_second": 512.0, "bytes_per_token": 23040, "ratio": 0.66},
        {"tokens": 1024, "prefill_ttft_s": 2.0, "raw_bytes": 23040 * 1024, "wire_bytes": round(23040 * 1024 * 0.66)},
    ],
    ids=["publish --dry-run", "bench ttft"],
)
def test_a_measurement_replaces_the_presets(measured, tmp_path):
    """Rate, ratio and size as this machine has them, from either command's JSON."""
    path = tmp_path / "here.json"
    path.write_text(json.dumps({**measured, "document": "x", "samples_s": {}}))
    found = economics("--measured", path, "--model", "smollm2-135m", "--tokens", "1024")
    assert found["latency"]["prefill_tokens_per_s"] == pytest.approx(512)
    assert found["assumptions"]["stored_ratio"]["value"] == pytest.approx(0.66, rel=1e-5)
    assert str(path) in found["assumptions"]["flops"]["source"]
    alone = economics("--measured", path, "--tokens", "1024")
    assert 23040 * 1024 == alone["sizes"]["raw_bytes"]
    for bad in ({}, {**measured, "tokens_per_second": -1, "prefill_ttft_s": 0}):
        path.write_text(json.dumps(bad))
        assert 2 == kvcdn("economics", "--measured", path).code


def test_a_map_is_drawn(tmp_path):
    """Both formats, of the right kind; and a folder that is not there is a disk that is not available."""
    pytest.importorskip("matplotlib")
    for name, magic in (("map.svg", b"<?xml"), ("map.png", b"\x89PNG")):
        ran = kvcdn("economics", "--plot", tmp_path / name, "--tokens", "32768")
        assert 0 == ran.code, ran.err
        assert (tmp_path / name).read_bytes().startswith(magic)
    assert 5 == kvcdn("economics", "--plot", tmp_path / "none" / "map.svg").code


def test_a_map_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    """The extra is named, and nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = kvcdn("economics", "--plot", tmp_path / "map.svg")
    assert 2 == ran.code
    assert "kvcdn[plot]" in ran.complaint
    assert [] == list(tmp_path.iterdir())


def test_the_map_says_what_the_command_says():
    """A cell of the map is the command's own answer for that link and length."""
    from kvcdn.cli.economics_case import case_of
    from kvcdn.cli.economics_plot import _LENGTHS, _LINKS, speedups

    options = dict.fromkeys(
        ("model", "kv_bytes_per_token", "parameters", "retrain_days", "stored_ratio", "devices", "prefill_rate", "measured",
         "gpu_hour", "storage_usd", "request_usd", "write_usd", "egress_usd", "edge_usd", "input_usd", "cached_usd", "rtt",
         "prices")
    )  # fmt: skip
    options |= {"tokens": 3774, "question_tokens": 32, "reads": 1000.0, "days": 30.0, "precision": "bf16", "device": "l40s",
                "utilisation": 0.4, "gpu_waits": False, "store": "s3", "delivery": "bunny", "hit_ratio": 0.9,
                "tariff": "gpt-5.6", "zero_egress": "r2", "link": "office", "open_rate": 2.4e9,
                "request_bytes": 2.0**23}  # fmt: skip
    shown = speedups(case_of(options))
    tokens, speed = _LENGTHS[30], _LINKS[20]
    found = economics("--device", "l40s", "--tokens", str(tokens), "--link", f"{speed / 1e6:.6f}MB/s", "--rtt", "0.01")
    assert shown[20][30] == pytest.approx(found["latency"]["speedup"], rel=1e-4)


def test_the_report_is_renewed_in_place(tmp_path):
    """A document's tables are made anew once; a second run changes nothing."""
    path = tmp_path / "mine.md"
    path.write_text("# Mine\n\n<!-- table: tariffs -->\n<!-- end -->\n")
    ran = kvcdn("economics", "--report", path, "--json")
    assert (0, True) == (ran.code, ran.json["changed"])
    assert "claude-sonnet-4-6" in path.read_text()
    assert not kvcdn("economics", "--report", path, "--json").json["changed"]
    assert 3 == kvcdn("economics", "--report", tmp_path / "none.md").code


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("genai:claude-sonnet-4-6", 4000, (3.0, 0.30)),
        ("genai:anthropic/claude-opus-5", 4000, (5.0, 0.50)),
        ("genai:gpt-6.1-sol", 100, (2.0, 0.10)),
    ],
)
def test_tariffs_of_genai_prices(name, tokens, expected):
    """The package's own data, without a network: those of the presets that it is the source of."""
    pytest.importorskip("genai_prices")
    from datetime import UTC, datetime

    from kvcdn.cli.genai_tariff import genai_tariff

    found = genai_tariff(name, tokens, datetime(2026, 11, 30, 12, tzinfo=UTC))
    assert expected == (pytest.approx(found.input_usd_per_million), pytest.approx(found.cached_usd_per_million))
    assert "2026-11-30" == found.date
    assert found.source.startswith("genai-prices ")


def test_a_tariff_of_genai_prices_is_used():
    """By name, with its source among the assumptions; a model that it does not know is refused."""
    pytest.importorskip("genai_prices")
    from typer.testing import CliRunner

    from kvcdn.cli.main import app
    from kvcdn.errors import UsageError

    done = CliRunner().invoke(app, ["economics", "--tariff", "genai:claude-sonnet-4-6", "--json"])
    assert 0 == done.exit_code
    assumed = json.loads(done.stdout)["assumptions"]["input_usd_per_million"]
    assert 3.0 == assumed["value"]
    assert "anthropic, claude-sonnet-4-6" in assumed["source"]
    refused = CliRunner().invoke(app, ["economics", "--tariff", "genai:no-such-model"])
    assert isinstance(refused.exception, UsageError)
    assert "genai-prices" in str(refused.exception)
