"""The documents tell the truth: links lead somewhere, commands and names exist, and the exit codes are the code's."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvcdn.errors import KvcdnError

ROOT = Path(__file__).parents[1]

REQUIRED = ("README.md", "FORMAT.md", "ARCHITECTURE.md")

DOCUMENTS = sorted({*(ROOT / name for name in REQUIRED), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})

SHELLS = {"console", "bash", "sh", "shell"}

OPERATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&>", "("}

LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)

REPOSITORY_PATH = re.compile(r"`((?:kvcdn|origin|edge|client|tests|infra|docs)/[\w./-]*)`")

EACH_DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@dataclass(frozen=True)
class Fence:
    """A fenced block: where it is, its language, and its text."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


@cache
def read(document: Path) -> str:
    return document.read_text("utf-8") if document.is_file() else ""


def fences(*languages: str) -> list[Fence]:
    """Every fenced block of these languages in every document."""
    found = []
    for document in DOCUMENTS:
        text = read(document)
        for match in re.finditer(r"^([ \t]*)```(\w+)[^\n]*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
            if match[2].lower() in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Fence(str(document.relative_to(ROOT)), line, match[2].lower(), textwrap.dedent(match[3])))
    return found


def without_code(text: str) -> str:
    """`text` without fenced, indented or inline code: what looks like a link in there is none."""
    text = re.sub(r"^([ \t]*)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+\s+(.+?)\s*#*$", re.sub(r"```.*?```", "", read(document), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


def command_lines(fence: Fence) -> list[str]:
    """The command lines of a block: all of a script, what follows the prompt in a session; continued lines joined."""
    text = fence.text.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    if fence.language == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line.removeprefix("$ ") for line in lines if line and not line.startswith("#")]


def kvcdn_calls(line: str) -> list[list[str]]:
    """The arguments of every call of kvcdn in a shell line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    calls: list[list[str]] = []
    current: list[str] | None = None
    first = True
    for word in lexer:
        if word in OPERATORS or set(word) <= set("|&;<>()"):
            current, first = None, True
        elif current is not None:
            current.append(word)
        elif first and not re.fullmatch(r"\w+=.*", word):
            first = word in {"sudo", "env", "exec", "time", "timeout"}
            if Path(word).name == "kvcdn":
                current = []
                calls.append(current)
    return calls


@cache
def root_command() -> Any:
    """The click command behind `kvcdn`."""
    import typer

    return typer.main.get_command(importlib.import_module("kvcdn.cli.main").app)


def check_call(words: list[str], where: str) -> None:
    """Asserts that each sub-command and option of a call exists."""
    command, waiting = root_command(), list(words)
    known = {"--help": None, "--install-completion": None, "--show-completion": None}
    path = ["kvcdn"]
    known |= {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    while waiting:
        word = waiting.pop(0)
        if word.startswith("-") and word not in {"-", "--"}:
            name = word.split("=", 1)[0]
            assert name in known, f"{where}: {' '.join(path)} has no option {name}"
            option = known[name]
            if option is not None and not getattr(option, "is_flag", False) and "=" not in word and waiting:
                waiting.pop(0)
        elif hasattr(command, "commands"):
            assert word in command.commands, f"{where}: {' '.join(path)} has no command {word}"
            command = command.commands[word]
            path.append(word)
            known |= {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}


def hints() -> list[tuple[str, str]]:
    """Every hint and message of the package that names a kvcdn command, with where it stands."""
    found = []
    for folder in ("kvcdn", "origin", "edge", "client"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(read(path))):
                if isinstance(node, ast.keyword) and node.arg == "hint":
                    text = re.sub(r"\{[^{}]*\}", "X", _literal(node.value))
                    calls = re.findall(r"\bkvcdn (?:[a-z][\w-]*)(?: (?:--?[a-z][\w-]*|[A-Z]\S*))*", text)
                    found += [(f"{path.relative_to(ROOT)}:{node.value.lineno}", call) for call in calls]
    return found


def _literal(node: ast.expr) -> str:
    """A string expression's text, with `X` for what is only known at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.IfExp):
        return f"{_literal(node.body)}; {_literal(node.orelse)}"
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return ""


@pytest.mark.parametrize("name", REQUIRED)
def test_document_is_there(name: str) -> None:
    """The repository has its three documents, each beginning with a title."""
    assert (ROOT / name).is_file()
    assert read(ROOT / name).startswith("# ")


@EACH_DOCUMENT
def test_links_lead_somewhere(document: Path) -> None:
    """A link to a file finds it, and a link to a heading finds that."""
    broken = []
    for match in LINK.finditer(without_code(read(document))):
        target = match[1] or match[2]
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        place, _, anchor = target.partition("#")
        path = (document.parent / place) if place else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


@EACH_DOCUMENT
def test_named_files_exist(document: Path) -> None:
    """A path of the repository that stands in the text is there."""
    assert [path for path in REPOSITORY_PATH.findall(read(document)) if "*" not in path and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("fence", fences(*SHELLS), ids=str)
def test_commands_exist(fence: Fence) -> None:
    """Every kvcdn command in a shell block names commands and options that there are."""
    for line in command_lines(fence):
        for words in kvcdn_calls(line):
            check_call(words, f"{fence}: {line}")


@pytest.mark.parametrize(("where", "call"), hints(), ids=str)
def test_hints_name_commands_that_exist(where: str, call: str) -> None:
    """An error's advice can be followed."""
    check_call(call.split()[1:], where)


@pytest.mark.parametrize("fence", fences("python", "py"), ids=str)
def test_python_blocks_are_python(fence: Fence) -> None:
    """A Python block parses, and what it imports from kvcdn is there."""
    tree = ast.parse(fence.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvcdn":
            module = importlib.import_module(node.module or "")
            missing = [alias.name for alias in node.names if not _has(module, alias.name)]
            assert missing == []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "kvcdn":
                    importlib.import_module(alias.name)


def _has(module: Any, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_readme_names_every_command() -> None:
    """The README's table of commands is complete, but for the commands within a group that is not the benchmarks'."""
    told = " ".join(re.findall(r"^\| (`kvcdn .*?) \|", read(ROOT / "README.md"), re.MULTILINE))
    commands = [*root_command().commands.items()]
    names = [name for name, command in commands if not hasattr(command, "commands")]
    names += [f"bench {name}" for name in dict(commands)["bench"].commands]
    assert [name for name in names if f"`kvcdn {name}`" not in told] == []


def test_rooms_are_described_once() -> None:
    """ARCHITECTURE.md has one row for each folder."""
    rooms = re.findall(r"^\| (`\w[^|]*`) \| (?:`kvcdn|-)", read(ROOT / "ARCHITECTURE.md"), re.MULTILINE)
    assert len(rooms) > 8
    assert sorted(set(rooms)) == sorted(rooms)


def test_exit_codes_are_told() -> None:
    """One table, its first column headed with the word exit, lists every exit code of the error tree, and 0."""
    told = []
    for document in DOCUMENTS:
        rows = read(document).splitlines()
        for number, row in enumerate(rows):
            if re.match(r"\|\s*exit\b", row, re.IGNORECASE):
                codes = []
                for line in rows[number + 2 :]:
                    match = re.match(r"\|\s*`?(\d+)`?\s*\|", line)
                    if not match:
                        break
                    codes.append(int(match[1]))
                told.append(codes)
    assert told
    for codes in told:
        assert sorted({0, *(kind.exit_code for kind in _tree(KvcdnError))}) == sorted(codes)


def _tree(kind: type[KvcdnError]) -> list[type[KvcdnError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _tree(child))]


def test_reader_of_shell_lines() -> None:
    """The helper finds the calls in what documents show: pipes, variables, quotes, continuation, comments."""
    fence = Fence(
        "x", 1, "console", "$ A=1 .venv/bin/kvcdn publish 'a b' \\\n    --json | jq . && kvcdn ls # kvcdn no\noutput kvcdn rm\n"
    )
    lines = command_lines(fence)
    assert len(lines) == 1
    assert kvcdn_calls(lines[0]) == [["publish", "a b", "--json"], ["ls"]]
    assert kvcdn_calls("pip install 'kvcdn[client]' kvcdn") == []
