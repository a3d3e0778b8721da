"""Publisher settings: sources and their order, what is refused, what is hidden, and the samples of both services."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcdn.edge import settings as edge_settings
from kvcdn.errors import UsageError
from kvcdn.origin.publishing import settings as origin_settings
from kvcdn.origin.publishing.settings import PublisherSettings, load_settings
from kvcdn.origin.service import service_settings

INFRA = Path(__file__).parents[1] / "infra"

SERVICES = {
    "publisher": (origin_settings, PublisherSettings, INFRA / "origin.toml", "KVCDN_PUBLISHER_"),
    "service": (service_settings, service_settings.ServiceSettings, INFRA / "service.toml", "KVCDN_SERVICE_"),
    "edge": (edge_settings, edge_settings.EdgeSettings, INFRA / "edge.toml", "KVCDN_EDGE_"),
}

EACH_SERVICE = pytest.mark.parametrize("service", SERVICES)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KVCDN_PUBLISHER_", "KVCDN_EDGE_", "KVCDN_SERVICE_")):
            monkeypatch.delenv(name)


def service_of(name: str) -> tuple[ModuleType, Any, Path, str]:
    return SERVICES[name]


def uncommented(sample: Path) -> str:
    """The sample with every commented setting switched on."""
    return re.sub(r"^# ?(?=[a-z_]+ = )", "", sample.read_text("utf-8"), flags=re.MULTILINE)


def commented(sample: Path) -> dict[str, Any]:
    """The settings that the sample shows commented out."""
    lines = re.findall(r"^# ?([a-z_]+ = .*)$", sample.read_text("utf-8"), re.MULTILINE)
    return tomllib.loads("\n".join(lines))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text, encoding="utf-8")
    return path


@EACH_SERVICE
def test_sample_loads(service: str) -> None:
    """The commented sample in infra/ is a valid file as it stands."""
    module, _, sample, _ = service_of(service)
    assert "s3://kvcdn/production" == module.load_settings(sample, {}).origin


@EACH_SERVICE
def test_sample_loads_with_everything_switched_on(service: str, tmp_path: Path) -> None:
    """Whoever removes a comment sign gets a setting that is accepted, and nothing stands in the sample twice."""
    module, model, sample, _ = service_of(service)
    settings = module.load_settings(write(tmp_path, uncommented(sample)), {})
    assert set(commented(sample)) <= settings.model_fields_set <= set(model.model_fields)
    assert len(settings.model_fields_set) > 5


@EACH_SERVICE
def test_sample_names_every_setting(service: str) -> None:
    """What can be set is explained: as a line, active or commented, or as the variable that is better for it."""
    _, model, sample, prefix = service_of(service)
    text = uncommented(sample)
    lines = set(tomllib.loads(text))
    assert set() == {name for name in model.model_fields if name not in lines and prefix + name.upper() not in text}


@EACH_SERVICE
def test_sample_shows_defaults_that_are_true(service: str, tmp_path: Path) -> None:
    """A commented line shows the default, wherever there is one to show."""
    module, model, sample, _ = service_of(service)
    settings = module.load_settings(write(tmp_path, uncommented(sample)), {})
    shown = {name: getattr(settings, name) for name in commented(sample)}
    defaults = {name: model.model_fields[name].get_default(call_default_factory=True) for name in shown}
    nothing = (None, (), {}, edge_settings.TenantLimits())  # then the line shows a form to follow
    assert {} == {name: value for name, value in shown.items() if defaults[name] not in (*nothing, value)}
    shown_here = {"adapters", "device", "label", "precision", "progressive"}
    assert service != "publisher" or shown_here == {name for name in defaults if defaults[name] is not None}


@EACH_SERVICE
def test_every_setting_is_described(service: str) -> None:
    """Each field documents itself."""
    _, model, _, _ = service_of(service)
    assert [] == [name for name, field in model.model_fields.items() if not field.description]


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ('model = "m"\ncolour = "red"', "publisher settings: colour is no setting"),
        ('device = "cpu"', "model is missing"),
        ('model = ""', "model: "),
        ("model = 7", "model: "),
        ('model = "m"\norigin = "https://cdn.example.org"', "origin: http(s) origins can only be read"),
        ('model = "m"\norigin = ""', "origin: "),
        ('model = "m"\ndays = 0', "days: "),
        ('model = "m"\nadapters = "/a"', "adapters: "),
        ('model = "m"\ndays = 1000000', "days: "),
        ('model = "m"\nlabel = "' + "x" * 257 + '"', "label: "),
        ("model = ", "cannot read settings from"),
        ('model = "a"\nmodel = "b"', "cannot read settings from"),
    ],
)
def test_wrong_file_is_refused_by_the_name_of_what_is_wrong(tmp_path: Path, toml: str, named: str) -> None:
    """The error names the field, and a hint says where to read on."""
    with pytest.raises(UsageError) as caught:
        load_settings(write(tmp_path, toml), {})
    assert named in str(caught.value)
    assert "infra/origin.toml" in caught.value.hint


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """One run shows every mistake."""
    with pytest.raises(UsageError) as caught:
        load_settings(write(tmp_path, 'colour = "red"\ndays = 0'), {})
    told = str(caught.value).removeprefix("publisher settings: ").split("; ")
    assert ["colour", "days", "model"] == sorted(re.split("[ :]", line)[0] for line in told)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not UTF-8"])
def test_unreadable_file_is_a_usage_error(tmp_path: Path, content: bytes | None) -> None:
    """A path that leads nowhere, or to no text, is told as such."""
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot read settings from"):
        load_settings(path, {})


def test_overrides_beat_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of sources, and None for an option that was not given."""
    path = write(tmp_path, 'model = "file"\ndevice = "file"\nnamespace = "file"\nlabel = "file"')
    for name in ("MODEL", "DEVICE", "NAMESPACE"):
        monkeypatch.setenv(f"KVCDN_PUBLISHER_{name}", "environment")
    settings = load_settings(path, {"model": "override", "device": None})
    assert ("override", "environment", "environment", "file") == (
        settings.model,
        settings.device,
        settings.namespace,
        settings.label,
    )


def test_environment_alone_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting can be a variable, of its own type; an empty one counts as not set."""
    given = {
        "origin": "s3://bucket/prefix",
        "endpoint": "http://127.0.0.1:1",
        "model": "m",
        "adapters": '["/a", "/b"]',
        "device": "cuda:1",
        "namespace": "acme",
        "key_file": "/k",
        "key_passphrase_file": "/p",
        "trust_file": "/t",
        "label": "l",
        "days": "30",
        "precision": "int8",
        "progressive": "true",
        "min_quality": "0.002",
    }
    assert set(given) == set(PublisherSettings.model_fields)
    for name, value in given.items():
        monkeypatch.setenv(f"KVCDN_PUBLISHER_{name.upper()}", value)
    settings = load_settings(None, {})
    typed = {
        "adapters": (Path("/a"), Path("/b")),
        "key_file": Path("/k"),
        "key_passphrase_file": Path("/p"),
        "trust_file": Path("/t"),
        "days": 30,
        "min_quality": 0.002,
        "progressive": True,
    }
    assert {**given, **typed} == settings.model_dump()
    monkeypatch.setenv("KVCDN_PUBLISHER_DAYS", "")
    assert load_settings(None, {}).days is None


@pytest.mark.parametrize("name", ["KVCDN_PUBLISHER_MODLE", "KVCDN_PUBLISHER_"])
def test_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A misspelt variable does not go unnoticed."""
    monkeypatch.setenv(name, "x")
    with pytest.raises(UsageError, match=f"the environment sets {name}, which is no setting"):
        load_settings(None, {"model": "m"})


def test_variables_of_other_parts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edge on the same machine, and the commands' own variables, do not disturb a publisher."""
    monkeypatch.setenv("KVCDN_EDGE_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("KVCDN_ORIGIN", "elsewhere")
    assert load_settings(None, {"model": "m"}).origin is None


def test_refusal_shows_no_value() -> None:
    """What was given may hold a password: an error names the field only."""
    with pytest.raises(UsageError) as caught:
        load_settings(None, {"model": "m", "origin": "https://user:very-secret@host", "days": "very-secret"})
    assert "origin: " in str(caught.value)
    assert "days: " in str(caught.value)
    assert "very-secret" not in str(caught.value) + caught.value.hint


def test_settings_do_not_change() -> None:
    """The model is frozen."""
    settings = load_settings(None, {"model": "m"})
    with pytest.raises(ValueError, match="frozen"):
        settings.model = "other"
