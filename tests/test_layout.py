"""The rooms of ARCHITECTURE.md: who may import whom, what lies where, and what no module may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from support.waiting import PROCESS_SECONDS

ROOT = Path(__file__).parents[1]

MODULE_LINES = 400
"""A longer module is two nouns."""

SMALL_CHANGE = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "base", "core"}
"""Names that say nothing about what is inside."""

FOLDERS = {"kvcdn", "origin", "edge", "client", "tests", "infra", "docs"}

MADE_BY_TOOLS = {"build", "dist", "__pycache__", "kvcdn.egg-info"}

HEAVY = ("torch", "numpy", "numba", "blosc2", "transformers", "safetensors")
"""What an edge must never load: each costs more memory than all of its cache index."""

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "imp"}
"""Readers that run what they read."""

FORBIDDEN_CALLS = {"eval", "exec", "__import__"}

FORBIDDEN_METHODS = {("torch", "load"), ("joblib", "load"), ("yaml", "load"), ("os", "system"), ("os", "popen")}

NETWORK = {"socket", "ssl", "http", "urllib", "asyncio", "subprocess", "selectors"}
"""Standard modules that the core, which does no I/O, has no use for."""


INNER: dict[str, set[str]] = {"client": set(), "edge": {"memory", "page", "settings", "threads"}, "origin": set()}
"""Rooms with folders, and the modules at their top which those may import; what else is at the top stands on the folders."""


@cache
def rooms() -> dict[str, tuple[Path, set[str], str]]:
    """ARCHITECTURE.md's table: package to folder, packages it may import, and the words of that cell."""
    found = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text("utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1].startswith("kvcdn"):
            words = cells[3]
            allowed = set(re.findall(r"\b(core|stores|model|access|accounting|codecs|economics|everything)\b", words))
            found[cells[1]] = (ROOT / cells[0].removesuffix("*.py"), allowed, words)
    return found


def modules(package: str) -> list[Path]:
    """The Python files of a room; the core's are those directly in its folder."""
    folder, _, _ = rooms()[package]
    return sorted(folder.glob("*.py") if package == "kvcdn" else folder.rglob("*.py"))


ALL = [(package, path) for package in rooms() for path in modules(package)]

IDS = [str(path.relative_to(ROOT)) for _, path in ALL]

EACH = pytest.mark.parametrize(("package", "path"), ALL, ids=IDS)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def imports(package: str, path: Path) -> set[str]:
    """Every module that `path` imports, anywhere in it, relative imports resolved."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (parent, node.module)))
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "kvcdn" else {module}
    return found


def room_of(module: str) -> str:
    """The room in which `module` lies: the core, or a sub-package."""
    parts = module.split(".")
    named = ".".join(parts[:2])
    return named if named in rooms() else "kvcdn"


def test_table_has_every_room() -> None:
    """The table names the rooms that this test knows; the rules below are read from it."""
    expected = {"kvcdn", "kvcdn.stores", "kvcdn.model", "kvcdn.origin", "kvcdn.edge", "kvcdn.client", "kvcdn.cli"}
    expected |= {"kvcdn.access", "kvcdn.accounting", "kvcdn.codecs", "kvcdn.economics", "kvcdn.simulation"}
    assert expected == set(rooms())
    assert {"everything"} == rooms()["kvcdn.cli"][1]
    core_only = ("kvcdn.stores", "kvcdn.access", "kvcdn.codecs", "kvcdn.economics")
    assert [{"core"}] * 4 == [rooms()[name][1] for name in core_only]
    assert {"codecs"} == rooms()["kvcdn"][1]
    assert {"core", "economics"} == rooms()["kvcdn.simulation"][1]
    assert {"core", "codecs"} == rooms()["kvcdn.model"][1]
    assert {"core", "economics"} == rooms()["kvcdn.accounting"][1]


@EACH
def test_imports_point_inwards(package: str, path: Path) -> None:
    """A module imports its own room and those that the table allows: siblings never meet."""
    _, allowed, _ = rooms()[package]
    reached = {room_of(module) for module in imports(package, path) if module.split(".")[0] == "kvcdn"}
    names = {
        "core": "kvcdn",
        "stores": "kvcdn.stores",
        "model": "kvcdn.model",
        "access": "kvcdn.access",
        "accounting": "kvcdn.accounting",
        "economics": "kvcdn.economics",
        "codecs": "kvcdn.codecs",
    }
    may = set(rooms()) if "everything" in allowed else {package, *(names[word] for word in allowed)}
    assert set() == reached - may


def folders(room: str) -> list[str]:
    """ARCHITECTURE.md's table of what lies inside a room: its folders, in order."""
    return re.findall(rf"^\| `{room}/(\w+)/` \|", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("room", INNER)
def test_folders_of_a_room_are_told(room: str) -> None:
    """The table inside a room names each folder, with the sentence that the folder says of itself."""
    found = {path.parent.name for path in (ROOT / room).glob("*/__init__.py")} - {"page"}
    assert found == set(folders(room))
    table = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    for name in folders(room):
        assert f"| `{room}/{name}/` | {ast.get_docstring(tree(ROOT / room / name / '__init__.py'))} |" in table


IN_FOLDERS = [(room, path) for room in INNER for path in sorted((ROOT / room).glob("*/*.py")) if path.parent.name != "page"]


@pytest.mark.parametrize(("room", "path"), IN_FOLDERS, ids=[str(path.relative_to(ROOT)) for _, path in IN_FOLDERS])
def test_folders_of_a_room_import_in_order(room: str, path: Path) -> None:
    """A module imports its own folder, those above it in the table, and at the room's top what the room stands on."""
    order = folders(room)
    inside = [module.split(".")[2:] for module in imports(f"kvcdn.{room}", path) if module.startswith(f"kvcdn.{room}.")]
    below = {*order[: order.index(path.parent.name) + 1], *INNER[room]}
    assert set() == {parts[0] for parts in inside} - below


def test_modules_that_architecture_names_are_there() -> None:
    """A module that was moved is not looked for in its old place."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    named = set(re.findall(r"(?<![\w./-])(?:kvcdn\.)?((?:client|edge|origin)(?:\.[a-z_]+)+)", text))
    assert {"client.planning.race", "edge.answers.app"} <= named
    missing = [name for name in named if not any(_lies_there(name, parts) for parts in (2, 3))]
    assert missing == []


def _lies_there(name: str, parts: int) -> bool:
    """Whether the first `parts` parts of a dotted name are a module or a folder."""
    path = ROOT.joinpath(*name.split(".")[:parts])
    return len(name.split(".")) >= parts and (path.with_suffix(".py").is_file() or (parts == 3 and path.is_dir()))


@pytest.mark.parametrize("path", modules("kvcdn"), ids=lambda path: path.name)
def test_core_needs_three_libraries(path: Path) -> None:
    """The core imports what its row of the table names, blosc2 inside its codec only, and nothing that talks to a network."""
    words = rooms()["kvcdn"][2]
    assert "the standard library, blake3, cryptography, blosc2" in words
    outside = {module.split(".")[0] for module in imports("kvcdn", path)} - {"kvcdn", *sys.stdlib_module_names}
    assert set() == outside - {"blake3", "cryptography", *(["blosc2"] if path.name == "codec.py" else [])}
    assert set() == {module.split(".")[0] for module in imports("kvcdn", path)} & NETWORK


@pytest.mark.parametrize("path", modules("kvcdn"), ids=lambda path: path.name)
def test_core_loads_codecs_late(path: Path) -> None:
    """Importing the core imports no arrays: only functions of its codec module import from kvcdn.codecs."""
    late = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in late for node in ast.walk(function)}
    found = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom) and "kvcdn.codecs" in str(node.module)]
    assert [node.lineno for node in found if id(node) not in inside or path.name != "codec.py"] == []


@pytest.mark.parametrize("path", modules("kvcdn.codecs"), ids=lambda path: path.name)
def test_codecs_only_compute(path: Path) -> None:
    """Codecs take bytes and arrays and give bytes and arrays: numpy and pcodec, no torch, no files, no network.

    What compiles has numba, and asks the system to tell it of forks; what writes instructions has its compiler, too;
    what decodes zstd has zstandard; what uses the matrix unit looks for what numba is told of the processor.
    """
    instructions = {"llvmlite", "numba"}
    own = {
        "compiled.py": {"numba", "os"},
        "chunks.py": instructions,
        "matrixunit.py": {*instructions, "os"},
        "pages.py": instructions,
        "tiles.py": instructions,
        "zstd.py": {"zstandard"},
    }
    compiler: set[str] = own.get(path.name, set())
    tops = {module.split(".")[0] for module in imports("kvcdn.codecs", path)} - compiler
    assert set() == tops - {"kvcdn", "numpy", "pcodec", *sys.stdlib_module_names}
    assert set() == tops & {*NETWORK, "os", "io", "pathlib", "shutil", "tempfile"}


@pytest.mark.parametrize("path", modules("kvcdn.economics"), ids=lambda path: path.name)
def test_economics_only_computes(path: Path) -> None:
    """The economics imports the standard library and the core, and nothing that reads files or talks to a network."""
    tops = {module.split(".")[0] for module in imports("kvcdn.economics", path)}
    assert set() == tops - {"kvcdn", *sys.stdlib_module_names}
    assert set() == tops & {*NETWORK, "os", "io", "pathlib", "shutil", "tempfile"}
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert "open" not in {call.func.id for call in calls if isinstance(call.func, ast.Name)}


@pytest.mark.parametrize("path", modules("kvcdn.simulation"), ids=lambda path: path.name)
def test_simulation_only_computes(path: Path) -> None:
    """The simulation has numpy, and neither a clock nor files nor a network: the same goes in, the same comes out."""
    tops = {module.split(".")[0] for module in imports("kvcdn.simulation", path)}
    assert set() == tops - {"kvcdn", "numpy", *sys.stdlib_module_names}
    assert set() == tops & {*NETWORK, "os", "io", "pathlib", "shutil", "tempfile", "time", "random"}


@pytest.mark.parametrize("path", modules("kvcdn.edge"), ids=lambda path: path.name)
def test_edge_names_nothing_heavy(path: Path) -> None:
    """No module of the edge imports torch, an array library or a model library, not even late."""
    assert set() == {module.split(".")[0] for module in imports("kvcdn.edge", path)} & set(HEAVY)


def test_edge_loads_nothing_heavy() -> None:
    """Nor does anything that the edge imports: a running edge holds none of them."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in modules("kvcdn.edge") if not path.stem.startswith("__")]
    names = [".".join(("kvcdn", *path.parts)) for path in paths]
    program = f"import sys, importlib; [importlib.import_module(n) for n in {names!r}]; print(*sys.modules)"
    # -P: what is installed is looked at, not ./kvcdn of the working directory, which lacks the edge.
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=PROCESS_SECONDS
    )
    loaded = {module.split(".")[0] for module in done.stdout.split()}
    assert "kvcdn" in loaded
    assert set() == loaded & set(HEAVY)


def test_top_level_holds_the_rooms_only() -> None:
    """Everything lies in a room; hidden folders and what tools make are the only others."""
    found = {entry.name for entry in ROOT.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    assert found - MADE_BY_TOOLS == FOLDERS & found
    assert found >= {"kvcdn", "tests"}


def test_top_level_holds_no_modules() -> None:
    """A module at the root belongs to no package and would be importable by accident."""
    assert list(ROOT.glob("*.py")) == []


@EACH
def test_module_says_what_it_is(package: str, path: Path) -> None:
    """A module's first line is a sentence about one noun."""
    docstring = ast.get_docstring(tree(path))
    assert docstring
    assert docstring.splitlines()[0].rstrip().endswith((".", ":", "?"))


@EACH
def test_module_has_a_telling_name(package: str, path: Path) -> None:
    """No drawer for what found no place."""
    assert path.stem not in SMALL_CHANGE


@EACH
def test_module_is_short(package: str, path: Path) -> None:
    """A module is read in one sitting."""
    assert len(path.read_text("utf-8").splitlines()) < MODULE_LINES


@EACH
def test_module_is_finished(package: str, path: Path) -> None:
    """No note to oneself is left, and no body that does nothing."""
    assert re.findall(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text("utf-8")) == []
    raised = [node.exc for node in ast.walk(tree(path)) if isinstance(node, ast.Raise)]
    assert "NotImplementedError" not in {ast.unparse(error).split("(")[0] for error in raised if error}


def _reads_tensors_only(call: ast.Call) -> bool:
    """torch.load as its documentation has it for files of others: it makes tensors and containers, and runs nothing."""
    return ast.unparse(call.func) == "torch.load" and any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in call.keywords
    )


@EACH
def test_module_runs_no_data(package: str, path: Path) -> None:
    """Nothing that could run what came from a network or a disk."""
    assert set() == {module.split(".")[0] for module in imports(package, path)} & FORBIDDEN_MODULES
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and not _reads_tensors_only(node)]
    assert set() == {call.func.id for call in calls if isinstance(call.func, ast.Name)} & FORBIDDEN_CALLS
    methods = {
        (call.func.value.id, call.func.attr)
        for call in calls
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    }
    assert set() == methods & FORBIDDEN_METHODS
    shells = [word for call in calls for word in call.keywords if word.arg == "shell"]
    assert [word for word in shells if not (isinstance(word.value, ast.Constant) and word.value.value is False)] == []
    trusting = [word for call in calls for word in call.keywords if word.arg == "trust_remote_code"]
    assert [word for word in trusting if not (isinstance(word.value, ast.Constant) and word.value.value is False)] == []


@EACH
def test_only_the_cli_prints(package: str, path: Path) -> None:
    """Libraries and services log; standard output belongs to the commands."""
    names = {node.func.id for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert package == "kvcdn.cli" or "print" not in names


@EACH
def test_no_bare_except(package: str, path: Path) -> None:
    """An except without a type would swallow an interrupt."""
    handlers = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler)]
    assert [node.lineno for node in handlers if node.type is None] == []


def test_every_package_is_installed() -> None:
    """A sub-package that setuptools is not told of works in a checkout and is missing from the wheel."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = setup["package-dir"]
    for package, (folder, _, _) in rooms().items():
        assert package in setup["packages"]
        for path in folder.rglob("*.py") if package != "kvcdn" else folder.glob("*.py"):
            inside = path.parent.relative_to(folder).parts
            assert ".".join((package, *inside)) in setup["packages"]
    assert folders == {"kvcdn.client": "client", "kvcdn.edge": "edge", "kvcdn.origin": "origin", "kvcdn": "kvcdn"}


@pytest.mark.parametrize("package", [name for name in rooms() if modules(name)])
def test_package_has_an_init(package: str) -> None:
    """A folder with modules is a package that says what it is."""
    assert (rooms()[package][0] / "__init__.py").is_file()


def test_core_is_typed() -> None:
    """Users' type checkers read our annotations."""
    assert (ROOT / "kvcdn" / "py.typed").is_file()
