"""Edge settings: sizes, sources and their order, what is refused, what is hidden."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcdn.access.listening import ListenAddress
from kvcdn.edge.settings import EdgeSettings, load_settings
from kvcdn.errors import UsageError
from kvcdn.sizes import parse_size

SAMPLE = Path(__file__).parent.parent / "infra" / "edge.toml"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("KVCDN_EDGE_"):
            monkeypatch.delenv(name)


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "edge.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_sample_loads() -> None:
    """The commented sample in infra/ is a valid configuration with the values it shows."""
    settings = load_settings(SAMPLE, {})
    assert (200 * 1000**3, "127.0.0.1:8400", False) == (settings.capacity, settings.listen, settings.insecure_http)


def test_the_sample_names_every_setting() -> None:
    """Nothing can be set that the sample does not explain."""
    text = SAMPLE.read_text(encoding="utf-8")
    assert [] == [name for name in EdgeSettings.model_fields if name != "token" and f"{name} = " not in text]
    assert "KVCDN_EDGE_TOKEN" in text


def test_every_setting_is_described() -> None:
    """Each field documents itself."""
    assert [] == [name for name, field in EdgeSettings.model_fields.items() if not field.description]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GB", 200 * 1000**3),
        ("180GiB", 180 * 1024**3),
        ("1.5 TB", 1_500_000_000_000),
        ("1048576", 1048576),
        ("64mib", 64 * 1024**2),
        ("2000000b", 2_000_000),
        (5_000_000, 5_000_000),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str | int, size: int) -> None:
    """GB counts in thousands, GiB in 1,024s, and case does not matter."""
    assert size == parse_size(text)


@given(st.integers(0, 10**15 - 1), st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str) -> None:
    """No rounding creeps in."""
    assert number * 1000 ** (" KMGT".index(unit[0])) == parse_size(f"{number}{unit}")


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 parsec", "1e9", "1,5GB", "\u0663GB", "nan", True, "1GB 2GB", "9" * 5000])
def test_what_is_no_size_is_refused(text: object) -> None:
    """A size is a plain number and a known unit, nothing else."""
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ('origin = "x"\ncapacity = "lots"', "capacity: 'lots' is not a size"),
        ('origin = "x"\ncapacity = 200', "capacity: 200 bytes"),
        ('origin = "x"\ncolour = "red"', "colour is no setting"),
        ('capacity = "1GB"', "origin is missing"),
        ('origin = "x"\nlisten = "8400"', "listen: '8400' is not HOST:PORT"),
        ('origin = "x"\nlisten = "127.0.0.1:99999"', "listen: "),
        ('origin = "x"\nkeepalive_seconds = 0', "keepalive_seconds: "),
        ('origin = "x"\nlog_level = "loud"', "log_level: "),
        ("origin = ", "cannot read settings from"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_what_is_wrong(tmp_path: Path, toml: str, named: str) -> None:
    """The error names the field, and a hint says where to read on."""
    with pytest.raises(UsageError) as caught:
        load_settings(_write(tmp_path, toml), {})
    assert named in str(caught.value)
    assert "infra/edge.toml" in caught.value.hint


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    """A path that leads nowhere is told as such."""
    with pytest.raises(UsageError, match="cannot read settings from"):
        load_settings(tmp_path / "none.toml", {})


def test_overrides_beat_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of sources, and None for an option that was not given."""
    path = _write(tmp_path, 'origin = "file"\nlisten = "127.0.0.1:1"\nmax_headers = 20')
    monkeypatch.setenv("KVCDN_EDGE_ORIGIN", "environment")
    monkeypatch.setenv("KVCDN_EDGE_LISTEN", "127.0.0.1:2")
    settings = load_settings(path, {"origin": "override", "listen": None, "capacity": "3GB"})
    assert ("override", "127.0.0.1:2", 20, 3_000_000_000) == (
        settings.origin,
        settings.listen,
        settings.max_headers,
        settings.capacity,
    )


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable does not go unnoticed."""
    monkeypatch.setenv("KVCDN_EDGE_CAPACTIY", "1GB")
    with pytest.raises(UsageError, match="KVCDN_EDGE_CAPACTIY"):
        load_settings(None, {"origin": "x"})


def test_secrets_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither repr nor an error message holds a token."""
    monkeypatch.setenv("KVCDN_EDGE_TOKEN", "very-secret-token-1")
    settings = load_settings(None, {"origin": "x", "origin_token": "very-secret-token-2"})
    assert "very-secret" not in repr(settings)
    assert "very-secret" not in settings.model_dump_json()
    with pytest.raises(UsageError) as caught:
        load_settings(None, {"origin": "x", "capacity": "no", "origin_token": ["very-secret-token-3"]})
    assert "very-secret" not in str(caught.value)


def test_settings_do_not_change() -> None:
    """The model is frozen."""
    settings = load_settings(None, {"origin": "x"})
    with pytest.raises(ValueError, match="frozen"):
        settings.origin = "y"


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:0", True),
        ("127.9.9.9:80", True),
        ("localhost:80", True),
        ("[::1]:80", True),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("10.0.0.1:80", False),
        ("localhost.example.org:80", False),
    ],
)
def test_loopback_is_known(listen: str, loopback: bool) -> None:
    """Only addresses of this machine count, and a name may be anything."""
    assert loopback == ListenAddress.parse(listen).is_loopback
