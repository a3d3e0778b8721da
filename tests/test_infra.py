"""Infra: units, containers and variables name what there is, and the local stack really runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.waiting import PROCESS_SECONDS

ROOT = Path(__file__).parents[1]

INFRA = ROOT / "infra"

PROGRAM = Path(sys.executable).with_name("kvcdn")

INSTALLED = "/opt/kvcdn/bin/kvcdn"

UNITS = sorted(INFRA.glob("*.service"))

IMAGES = sorted(INFRA.glob("*.Dockerfile"))

ENVIRONMENTS = sorted(INFRA.glob("*.env.example"))


EACH_UNIT = pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)

EACH_IMAGE = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KVCDN_EDGE_", "KVCDN_PUBLISHER_", "AWS_")):
            monkeypatch.delenv(name)


@cache
def commands() -> dict[str, Any]:
    """The commands of `kvcdn`, as click knows them."""
    import typer

    from kvcdn.cli.main import app

    found: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return found


def unknown_words(words: list[str]) -> list[str]:
    """Of the arguments of `kvcdn`: a command, or options of it, that there are not."""
    if words[0] not in commands():
        return [words[0]]
    options = {name for option in commands()[words[0]].params for name in option.opts} | {"--help"}
    return [word for word in words[1:] if word.startswith("-") and word.split("=")[0] not in options]


# -- units ----------------------------------------------------------------------------------------------------------------


@cache
def settings_of(unit: Path) -> dict[str, dict[str, list[str]]]:
    """Sections, keys and all values of a unit file. Fails on a line that is none of its syntax."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] | None = None
    for line in unit.read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = sections.setdefault(match[1], {})
        else:
            match = re.fullmatch(r"([A-Z]\w+)=(.*)", line)
            assert match is not None, line
            assert section is not None, line
            section.setdefault(match[1], []).append(match[2])
    return sections


def test_there_is_something_to_check() -> None:
    """The checks below have their subjects."""
    assert ["kvcdn-edge.service", "kvcdn-origin.service", "kvcdn-publish@.service"] == [path.name for path in UNITS]
    assert ["edge.Dockerfile", "publisher.Dockerfile"] == [path.name for path in IMAGES]
    assert ["edge.env.example", "publisher.env.example"] == [path.name for path in ENVIRONMENTS]


@EACH_UNIT
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    """systemd itself has nothing to say against any line of it."""
    copy = tmp_path / unit.name.replace("@.", "@srv-documents-handbook.txt.")
    copy.write_text(unit.read_text("utf-8").replace(INSTALLED, str(PROGRAM)), "utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
    assert ("", 0) == (done.stdout + done.stderr, done.returncode)
    copy.write_text(copy.read_text("utf-8") + "NoSuchSetting=1\n", "utf-8")
    again = subprocess.run(["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
    assert "NoSuchSetting" in again.stderr  # it does read this file


@EACH_UNIT
def test_unit_runs_a_command_that_exists(unit: Path) -> None:
    """ExecStart names a command and options of the program, and variables that the unit or its example file sets."""
    (line,) = settings_of(unit)["Service"]["ExecStart"]
    program, *words = line.split()
    assert program == INSTALLED
    assert [] == unknown_words(words)
    set_here = {entry.split("=")[0] for entry in settings_of(unit)["Service"].get("Environment", [])}
    used = set(re.findall(r"\$\{?(\w+)", line))
    assert set() == used - set_here - set(variables(INFRA / "publisher.env.example"))


@EACH_UNIT
def test_unit_gives_the_service_little(unit: Path) -> None:
    """No root, no capability, a file system that is read-only but for its own folders."""
    service = settings_of(unit)["Service"]
    expected = {
        "DynamicUser": ["yes"],
        "NoNewPrivileges": ["yes"],
        "ProtectSystem": ["strict"],
        "PrivateTmp": ["yes"],
        "CapabilityBoundingSet": [""],
        "SystemCallFilter": ["@system-service", "~@privileged"],
    }
    assert expected == {name: service.get(name) for name in expected}


def test_edge_unit_agrees_with_the_settings() -> None:
    """The cache folder of the sample settings is the one that the unit makes, and stopping gets the time that it may take."""
    from kvcdn.edge.reads.fetch import STOP_SECONDS
    from kvcdn.edge.settings import load_settings
    from kvcdn.errors import UsageError

    service = settings_of(INFRA / "kvcdn-edge.service")["Service"]
    settings = load_settings(INFRA / "edge.toml", {})
    assert [settings.cache_dir] == [Path("/var/cache") / name for name in service["CacheDirectory"]]
    assert settings.shutdown_seconds + STOP_SECONDS < float(service["TimeoutStopSec"][0])
    assert [str(UsageError.exit_code)] == service["RestartPreventExitStatus"]


def test_origin_unit_agrees_with_the_settings() -> None:
    """The queue of the sample settings lies in the folder that the unit makes, and stopping gets the time that it may take."""
    from kvcdn.origin.service.service_settings import load_settings

    service = settings_of(INFRA / "kvcdn-origin.service")["Service"]
    settings = load_settings(INFRA / "service.toml", {})
    assert settings.queue_file is not None
    assert [settings.queue_file.parent] == [Path("/var/lib") / name for name in service["StateDirectory"]]
    assert settings.stop_seconds < float(service["TimeoutStopSec"][0])


# -- variables --------------------------------------------------------------------------------------------------------------


@cache
def variables(path: Path) -> dict[str, str]:
    """The variables of an example file, active or commented out."""
    lines = re.findall(r"^(?:# )?([A-Z][A-Z0-9_]*)=(.*)$", path.read_text("utf-8"), re.MULTILINE)
    found = dict(lines)
    assert len(found) == len(lines)
    return found


def test_variables_are_ones_that_are_read() -> None:
    """Each variable of ours in an example file is read by the edge, by `kvcdn publish` or by the unit."""
    from kvcdn.edge.settings import EdgeSettings

    settings = {f"KVCDN_EDGE_{name.upper()}" for name in EdgeSettings.model_fields}
    assert set() == {name for name in variables(INFRA / "edge.env.example") if name.startswith("KVCDN_")} - settings
    options = {option.envvar for option in commands()["publish"].params}
    unit = set(re.findall(r"\$\{?(\w+)", settings_of(INFRA / "kvcdn-publish@.service")["Service"]["ExecStart"][0]))
    ours = {name for name in variables(INFRA / "publisher.env.example") if name.startswith("KVCDN_")}
    assert set() == ours - options - unit
    assert {"KVCDN_ORIGIN", "KVCDN_MODEL"} <= ours
    further = shlex.split(variables(INFRA / "publisher.env.example")["KVCDN_OPTIONS"])
    assert [] == unknown_words(["publish", *further])


# -- containers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, continued lines joined."""

    name: str
    text: str


@cache
def instructions(image: Path) -> tuple[Instruction, ...]:
    lines = [line for line in image.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found = tuple(Instruction(*line.split(maxsplit=1)) for line in joined)
    assert {item.name for item in found} <= {
        *("FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENV"),
        *("VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
    }
    return found


def texts(image: Path, name: str) -> list[str]:
    return [item.text for item in instructions(image) if item.name == name]


def environment(image: Path) -> dict[str, str]:
    return dict(word.split("=", 1) for text in texts(image, "ENV") for word in shlex.split(text))


@EACH_IMAGE
def test_image_copies_what_an_installation_needs(image: Path) -> None:
    """Every source that is copied exists, and the packages and files that pyproject.toml names are among them."""
    copied = [word for text in texts(image, "COPY") if "--from" not in text for word in text.split()[:-1]]
    assert [] == [name for name in copied if not (ROOT / name).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    needed = {*project["tool"]["setuptools"]["package-dir"].values(), project["project"]["readme"]}
    needed |= {"pyproject.toml", "constraints.txt", *project["project"]["license-files"]}
    assert set() == needed - set(copied)


@EACH_IMAGE
def test_image_installs_extras_that_exist(image: Path) -> None:
    """What pip is asked for is the project itself, with extras that it has, at the tested versions."""
    installs = [text for text in texts(image, "RUN") if "pip install" in text]
    assert installs
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    asked = re.findall(r"'?\.(?:\[([\w,]+)\])?'?$", installs[-1])
    assert len(asked) == 1
    assert set() == {name for name in asked[0].split(",") if name} - set(extras)
    for install in installs:
        assert install.count("pip install") == install.count("--constraint constraints.txt")


@EACH_IMAGE
def test_image_runs_a_command_that_exists(image: Path) -> None:
    """Entry point and default command name what the program has, and not as root."""
    import json

    (entry,), (command,), (user,) = texts(image, "ENTRYPOINT"), texts(image, "CMD"), texts(image, "USER")
    assert [INSTALLED] == json.loads(entry)
    assert [] == unknown_words(json.loads(command))
    assert int(user) > 0
    assert user in re.findall(r"--uid (\d+)", " ".join(texts(image, "RUN")))


@EACH_IMAGE
def test_image_says_what_was_not_tried(image: Path) -> None:
    """Nobody takes the file for one that was built here; its usage shows commands that exist."""
    head = image.read_text("utf-8").split("\nFROM ", 1)[0]
    assert "has not been built by the project's own checks" in head
    assert f"--file infra/{image.name}" in head


def test_edge_image_settings_make_an_edge_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an origin and a token its variables are settings that the edge accepts; without a token it refuses to be open."""
    from kvcdn.edge.settings import load_settings
    from kvcdn.edge.tenants.guard import Guard
    from kvcdn.errors import UsageError

    given = environment(INFRA / "edge.Dockerfile")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(None, {"origin": "s3://kvcdn/production"})
    with pytest.raises(UsageError):
        Guard.of(settings)
    monkeypatch.setenv("KVCDN_EDGE_TOKEN", "0123456789abcdef")
    settings = load_settings(None, {"origin": "s3://kvcdn/production"})
    assert "token" == Guard.of(settings).admit("Bearer 0123456789abcdef").tenant
    assert [str(settings.address.port)] == texts(INFRA / "edge.Dockerfile", "EXPOSE")
    assert str(settings.cache_dir) in texts(INFRA / "edge.Dockerfile", "VOLUME")[0]


def test_readme_names_every_file() -> None:
    """Nothing lies in infra/ unexplained."""
    text = (INFRA / "README.md").read_text("utf-8")
    files = {path.name for path in INFRA.iterdir() if path.is_file() and path.name != "README.md"}
    assert set() == {name for name in files if f"({name})" not in text}


# -- the local stack ----------------------------------------------------------------------------------------------------------


def stack(*options: str, **popen: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "VENV": str(Path(sys.executable).parents[1])}
    return subprocess.Popen(
        [str(INFRA / "local-stack"), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def processes_with(text: str) -> list[str]:
    """Command lines of running processes that contain `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_stack_explains_itself() -> None:
    """It can be started as it lies there, and tells its options."""
    process = stack("--help")
    output, _ = process.communicate()
    assert process.returncode == 0
    assert "--once" in output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack's folder, used by several runs; nothing runs on it in the end."""
    path = tmp_path_factory.mktemp("stack")
    yield path
    assert [] == processes_with(str(path))


def test_stack_answers_once(folder: Path, tiny_llama: Path) -> None:
    """Publisher, S3 server, edge and reader work together, and the document comes from the cache; nothing is left running."""
    process = stack("--once", "--dir", str(folder), "--model", str(tiny_llama))
    _, log = process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == 0, log
    assert "tokens came from the cache, as they should" in log
    assert [] == processes_with(str(folder))
    assert "kvcdn edge at http://127.0.0.1:" in (folder / "edge.log").read_text("utf-8")


def test_stack_stays_until_told(folder: Path, tiny_llama: Path) -> None:
    """A second start finds its data again, the commands that it shows work, and a signal ends all of it."""
    process = stack("--dir", str(folder), "--model", str(tiny_llama))
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line.strip())
            if "Ctrl-C" in line:
                break
        assert ["ask", "verify", "inspect"] == [line.split()[1] for line in lines if line.startswith("kvcdn ")], lines
        shown = next(line for line in lines if line.startswith("kvcdn inspect"))
        done = subprocess.run([PROGRAM, *shlex.split(shown)[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^trusted +yes$", done.stdout, re.MULTILINE)
        process.terminate()
        process.communicate()
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert [] == processes_with(str(folder))


def test_stack_fails_as_a_whole(tmp_path: Path) -> None:
    """Where one part fails, the others are ended, and the exit code and the last line say so."""
    process = stack("--once", "--dir", str(tmp_path), "--model", "no-such-model")
    _, log = process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == 1
    assert "no model 'no-such-model'" in log
    assert "publish" in log.strip().splitlines()[-1]
    assert [] == processes_with(str(tmp_path))
