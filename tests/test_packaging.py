"""The wheel: every module in it, nothing else, and a bare install that runs without torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.waiting import PROCESS_SECONDS

ROOT = Path(__file__).parents[1]

SOURCES = ("kvcdn", "origin", "edge", "client")

FILES = ("pyproject.toml", "README.md", "LICENSE")

HEAVY = {"torch", "numpy", "numba", "blosc2", "transformers", "safetensors"}

REPORT_MODULES = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"


def modules() -> set[str]:
    """Where each module of the tree belongs in an installation."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"]
    found = set()
    for package, folder in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            found.add(f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of the sources so that the checkout stays clean."""
    work = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        shutil.copytree(ROOT / name, work / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, work / "source" / name)
    isolation = [] if find_spec("setuptools") is None else ["--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", str(work), "."]
    done = subprocess.run(command, cwd=work / "source", capture_output=True, text=True, check=False, timeout=PROCESS_SECONDS)
    assert done.returncode == 0, done.stderr
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as an installer would."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(installed: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `program` far from the checkout, with the installed wheel in front of everything else."""
    return subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{program}", *arguments],
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
    )


def bare_distributions() -> set[str]:
    """What an install without extras brings: the dependencies and theirs, as far as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: set[str] = set()
    waiting = list(project["dependencies"])
    while waiting:
        requirement = waiting.pop()
        match = re.match(r"[\w.-]+", requirement)
        assert match
        name = re.sub(r"[-_.]+", "-", match[0]).lower()
        if name in found or "extra ==" in requirement.replace("extra==", "extra =="):
            continue
        found.add(name)
        try:
            waiting += distribution(name).requires or []
        except PackageNotFoundError:
            continue
    return found


def metadata(installed: Path) -> dict[str, list[str]]:
    (path,) = installed.glob("kvcdn-*.dist-info/METADATA")
    message = Parser().parsestr(path.read_text("utf-8"))
    return {name: message.get_all(name) or [] for name in message.keys()}  # noqa: SIM118 - a message is no dict


def test_wheel_holds_every_module(installed: Path) -> None:
    """What works in a checkout is in the wheel, and no test, sample or stray file is."""
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    packed = {name for name in found if not name.startswith("kvcdn-")}
    page = {f"kvcdn/edge/page/{path.name}" for path in (ROOT / "edge" / "page").glob("*.*") if path.suffix != ".py"}
    assert modules() | page | {"kvcdn/py.typed"} == packed
    assert {"kvcdn/__init__.py", "kvcdn/block.py"} <= packed


@pytest.mark.parametrize("package", ["cli", "client", "economics", "edge", "model", "origin", "stores"])
def test_wheel_holds_every_package(installed: Path, package: str) -> None:
    """Each room is a package of the wheel."""
    assert (installed / "kvcdn" / package / "__init__.py").is_file()


def test_wheel_holds_licence_and_command(installed: Path) -> None:
    """The licence travels along, and the command is `kvcdn`."""
    (information,) = installed.glob("kvcdn-*.dist-info")
    assert (ROOT / "LICENSE").read_bytes() == (information / "licenses" / "LICENSE").read_bytes()
    assert "kvcdn = kvcdn.cli.main:run" in (information / "entry_points.txt").read_text("utf-8")


def test_version_is_the_packages_own(installed: Path) -> None:
    """One version number, in the package."""
    done = run(installed, "import kvcdn; print(kvcdn.__version__, kvcdn.__file__)")
    version, place = done.stdout.split(maxsplit=1)
    assert [version] == metadata(installed)["Version"]
    assert Path(place.strip()).is_relative_to(installed)


def test_bare_install_asks_for_nothing_heavy(installed: Path) -> None:
    """Without extras no tensor library is installed; the extras bring them."""
    required = metadata(installed)["Requires-Dist"]
    bare = {re.split(r"[^\w-]", line)[0].lower() for line in required if "extra ==" not in line}
    assert set() == bare & HEAVY
    assert {"aiohttp", "blake3", "cryptography"} <= bare
    assert {"torch", "transformers", "blosc2"} <= {re.split(r"[^\w-]", line)[0].lower() for line in required}


def test_bare_install_closure_is_light() -> None:
    """Nor does any dependency's dependency bring one."""
    assert set() == bare_distributions() & HEAVY


@pytest.mark.parametrize(
    "program",
    [
        "import kvcdn.block, kvcdn.manifest, kvcdn.keys",
        "import kvcdn.stores",
        "import kvcdn.edge.answers.app",
        "import kvcdn.cli.main",
    ],
    ids=["core", "stores", "edge", "cli"],
)
def test_bare_install_can_import(installed: Path, program: str) -> None:
    """Core, stores, edge and the command line load nothing that a bare install lacks."""
    done = run(installed, f"{program}\n{REPORT_MODULES}")
    assert done.returncode == 0, done.stderr
    owners = packages_distributions()
    ours = bare_distributions() | {"kvcdn"}
    lacking = {}
    for module in done.stderr.split():
        names = {re.sub(r"[-_.]+", "-", name).lower() for name in owners.get(module, [])}
        if names and not names & ours and module not in {"_distutils_hack", "__editable___kvcdn_0_1_0_finder"}:
            lacking[module] = names
    assert lacking == {}


def test_help_loads_nothing_heavy(installed: Path) -> None:
    """`kvcdn --help` answers without torch, which takes seconds to load."""
    program = f"import atexit\natexit.register(lambda: exec({REPORT_MODULES!r}))\nfrom kvcdn.cli.main import run\nrun()"
    done = run(installed, program, "--help")
    assert done.returncode == 0, done.stderr
    assert "publish" in done.stdout
    assert "kvcdn" in done.stderr.split()
    assert set() == set(done.stderr.split()) & HEAVY


def test_misuse_ends_with_the_usage_code(installed: Path) -> None:
    """A command that is not there ends with exit code 2 and a sentence, not with a traceback."""
    done = run(installed, "from kvcdn.cli.main import run\nrun()", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr
