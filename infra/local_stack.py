"""The local stack: a real S3 server, an edge before it and one published document, on this machine, until Ctrl-C.

Every part is the real one, started as an operator would: SeaweedFS with two identities, `kvcdn keygen`, `kvcdn publish` as
the identity that may write, `kvcdn edge` as the one that may only read. Keys, trust list and data lie in one folder, so
nothing of the user's own is touched.
"""  # noqa: INP001 - a program, not a module of a package

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvcdn.cli.seaweed import BUCKET, HOST, Keys, S3Server, running_seaweed, write_private
from kvcdn.digest import Digest
from kvcdn.keys import manifest_key, model_tag

ROOT = Path(__file__).resolve().parents[1]

ORIGIN = f"s3://{BUCKET}/local"

QUESTION = "What is this document about?"

START_SECONDS = 60.0
"""An edge takes half a second to start; on a busy machine a multiple."""

STOP_SECONDS = 15.0
"""An edge gives running responses five seconds."""

COMMAND_SECONDS = 1800.0
"""A publish or a question: loading a model and prefilling a document on a slow machine."""

POLL_SECONDS = 0.1

DEFAULT_TEXT_CHARACTERS = 1200
"""Of the licence, as the document to publish: some 250 tokens, seconds of prefill on a laptop."""


class StackError(Exception):
    """A part of the stack did not do what it should."""


@dataclass(frozen=True)
class Stack:
    """What runs, and where."""

    folder: Path
    edge_url: str
    endpoint: str
    model: str
    document: Path
    manifest_key: str
    children: Mapping[str, subprocess.Popen[bytes]]

    @property
    def trust(self) -> Path:
        return self.folder / "config" / "kvcdn" / "trust"

    def ask(self, *options: str) -> list[str]:
        """The command that asks a question on the document."""
        return ["ask", str(self.document), QUESTION, *self._reading(), *options]

    def verify(self) -> list[str]:
        """The command that recomputes and compares."""
        return ["verify", str(self.document), *self._reading()]

    def inspect(self) -> list[str]:
        """The command that shows the document's manifest."""
        return ["inspect", self.manifest_key, "--origin", self.edge_url, "--trust", str(self.trust)]

    def _reading(self) -> list[str]:
        return ["--model", self.model, "--edge", self.edge_url, "--trust", str(self.trust)]


def main() -> int:
    """Runs the stack; the exit code."""
    options = _options()
    # As Ctrl-C: every context below is left, in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with _folder(options.dir) as folder, running_stack(folder, options) as stack:
            if options.once:
                return ask_once(stack)
            _tell(stack)
            _watch(stack)
    except StackError as error:
        _note(f"local-stack: {error}")
        return 1
    except KeyboardInterrupt:
        _note("\nlocal-stack: stopped")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="local-stack", description="An S3 server, an edge before it and one published document."
    )
    parser.add_argument("--model", default="smollm2-135m", help="checkpoint folder, hub id or alias (default: %(default)s)")
    parser.add_argument("--document", type=Path, help="a text file (default: the beginning of the licence)")
    parser.add_argument("--dir", type=Path, help="folder for data and keys, kept afterwards (default: a temporary one)")
    parser.add_argument("--listen", default=f"{HOST}:0", help="where the edge listens (default: %(default)s, a free port)")
    parser.add_argument("--once", action="store_true", help="ask one question through the stack; 0 if it came from the cache")
    return parser.parse_args()


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="kvcdn-local-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def running_stack(folder: Path, options: argparse.Namespace) -> Iterator[Stack]:
    """Everything, in the order in which it depends on each other; stopped in reverse. Raises StackError."""
    document = _document(folder, options.document)
    with contextlib.ExitStack() as stopping:
        server = stopping.enter_context(_s3_server(folder))
        publisher = _environment(folder, server, server.writer)
        if not (folder / "config" / "kvcdn" / "keys" / "default.pem").exists():
            _kvcdn(["keygen"], publisher)
        _note(f"publishing {document} with {options.model} to {ORIGIN} at {server.endpoint} ...")
        published = _kvcdn(["publish", str(document), "--model", options.model, "--origin", ORIGIN, "--json"], publisher)
        fingerprint, address = (Digest.parse(published[name], name) for name in ("fingerprint", "address"))
        reader = _environment(folder, server, server.reader)
        edge, url = stopping.enter_context(_edge(folder, options.listen, reader))
        yield Stack(
            folder=folder,
            edge_url=url,
            endpoint=server.endpoint,
            model=options.model,
            document=document,
            manifest_key=manifest_key(model_tag(fingerprint), address),
            children={"S3 server": server.process, "edge": edge},
        )


def ask_once(stack: Stack) -> int:
    """Asks one question through the edge: 0 where the document came from its cache, else 1."""
    answer = _kvcdn(stack.ask("--mode", "fetch", "--max-tokens", "4", "--json"), _user(stack.folder))
    report = answer["report"]
    _note(json.dumps(report))
    sound = report["reason"] is None and report["tokens_reused"] > 0
    counts = f"{report['tokens_reused']} of {report['tokens_total']} tokens came from the cache"
    _note(f"local-stack: {counts}, {'as they should' if sound else 'which is too few'}")
    return 0 if sound else 1


def _tell(stack: Stack) -> None:
    lines = [
        f"edge       {stack.edge_url}",
        f"S3 server  {stack.endpoint}, credentials in {stack.folder / 's3.env'}",
        f"folder     {stack.folder}",
        "",
        *(shlex.join(["kvcdn", *command]) for command in (stack.ask(), stack.verify(), stack.inspect())),
        "",
        "Ctrl-C ends the stack.",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _watch(stack: Stack) -> NoReturn:
    """Waits. Raises StackError when a child ends by itself."""
    while True:
        for name, process in stack.children.items():
            if process.poll() is not None:
                raise StackError(f"the {name} ended with {process.returncode}; see the logs in {stack.folder}")
        time.sleep(POLL_SECONDS)


# -- the parts ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _s3_server(folder: Path) -> Iterator[S3Server]:
    """With new credentials at every start; those that may write also lie in a shell file for people."""
    with contextlib.ExitStack() as running:
        try:
            server = running.enter_context(running_seaweed(folder / "s3", keep=True))
        except (FileNotFoundError, TimeoutError) as error:
            raise StackError(str(error)) from None
        access, secret = server.writer.access_key, server.writer.secret_key
        write_private(folder / "s3.env", f"AWS_ACCESS_KEY_ID={access}\nAWS_SECRET_ACCESS_KEY={secret}\n")
        yield server


@contextlib.contextmanager
def _edge(folder: Path, listen: str, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    ready = folder / "edge.json"
    ready.unlink(missing_ok=True)
    command = [str(_program()), "edge", "--origin", ORIGIN, "--cache", str(folder / "cache"), "--listen", listen]
    command += ["--trust", str(folder / "config" / "kvcdn" / "trust")]
    environment = {**environment, "KVCDN_EDGE_READY_FILE": str(ready)}
    with _child("edge", command, folder / "edge.log", environment, folder) as process:
        _await("edge", process, ready.exists, folder / "edge.log")
        yield process, str(json.loads(ready.read_text("utf-8"))["url"])


@contextlib.contextmanager
def _child(
    name: str, command: Sequence[str], log: Path, environment: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own group, so that Ctrl-C reaches it through us; where possible the kernel ends it if we are killed."""
    guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - the commands are those above
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=folder,
            process_group=0,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _note(f"local-stack: the {name} did not end in {STOP_SECONDS:.0f} s and is killed")
            process.kill()
            process.wait()


def _await(name: str, process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise StackError(f"the {name} did not start; its log ends with:\n{log.read_text('utf-8', 'replace')[-2000:]}")
        time.sleep(POLL_SECONDS)


# -- files and commands -----------------------------------------------------------------------------------------------------


def _document(folder: Path, given: Path | None) -> Path:
    if given is not None:
        return given.resolve()
    path = folder / "document.txt"
    path.write_text((ROOT / "LICENSE").read_text("utf-8").strip()[:DEFAULT_TEXT_CHARACTERS], "utf-8")
    return path


def _user(folder: Path) -> dict[str, str]:
    """Our environment, with keys and trust in the stack's folder, and none of kvcdn's or AWS's own variables."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("KVCDN_", "AWS_"))}
    return {**ours, "XDG_CONFIG_HOME": str(folder / "config")}


def _environment(folder: Path, server: S3Server, keys: Keys) -> dict[str, str]:
    """As an operator would set it for a process that talks to the S3 server."""
    # No file of the user's: a profile there may name another server.
    files = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {**_user(folder), **keys.environment(), "AWS_ENDPOINT_URL": server.endpoint, **files}


def _kvcdn(arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """Runs a command and returns its JSON, where it prints any. Raises StackError."""
    command = [str(_program()), *arguments]
    try:
        done = subprocess.run(  # noqa: S603 - the commands are those above
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise StackError(f"{shlex.join(command)} took more than {COMMAND_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise StackError(f"{shlex.join(command)} ended with {done.returncode}")
    return dict(json.loads(done.stdout)) if "--json" in arguments else {}


def _program() -> Path:
    return Path(sys.executable).with_name("kvcdn")


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
