"""kvcdn's own ways: through an edge, from S3 without one, and from this host's local store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcdn.cli.bench.against.bucket import Bucket
from kvcdn.cli.bench.against.stand import Stand
from kvcdn.cli.bench.against.way import Checks, Document, Reading, Server, Stopwatch, Stored, stored_file
from kvcdn.cli.rig import QUESTION
from kvcdn.cli.seaweed import HOST
from kvcdn.client.sources.sources import open_source
from kvcdn.edge.launch import RunningEdge, launch_edge
from kvcdn.errors import KvcdnError
from kvcdn.keys import PRECISION_NATIVE, Namespace, PrefixNames, block_key
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.stores import open_store
from kvcdn.stores.local import LocalStore

if TYPE_CHECKING:
    from kvcdn.client import Client
    from kvcdn.client.loading.report import Report
    from kvcdn.client.sources.source import Source
    from kvcdn.digest import ModelTag

CHECKS = Checks(
    "weights, layout, precision and tokens",
    "BLAKE3 and AES-GCM of each segment",
    "Ed25519 of each block, against a trust list",
    "digest of the weights, in the key; a canary",
    "AES-256-GCM under a key from the text",
)


class Ours:
    """What the ways below have in common: publish, read with a client, and tell what the report says."""

    checks = CHECKS
    setup = "the client as it comes, told to fetch"
    server: Server | None = None

    def __init__(self, stand: Stand, name: str, origin: str, precision: str = PRECISION_NATIVE) -> None:
        self.name = name
        self.lossy = precision != PRECISION_NATIVE
        self.origin = origin
        self._stand = stand
        self._precision = precision
        self._client: Client | None = None

    def keep(self, document: Document) -> None:
        stand = self._stand
        publisher = Publisher(stand.loaded, open_store(self.origin), stand.key)
        published = publisher.publish(stand.client.encode(document.text).token_ids, precision=self._precision)
        if published.precision != self._precision:
            raise KvcdnError(f"{document.name} was published in {published.precision}, not in {self._precision}")

    def source(self, port: int | None) -> Source:
        """What a reader reads from, over `port` if given."""
        raise KvcdnError(f"{self.name} reads from nowhere ({port})")

    def read(self, document: Document, question: str, tokens: int, *, port: int | None = None) -> Reading:
        if port is not None:
            client = self._stand.make_client(self.source(port), precision=self._precision)
            with client:
                return self._ask(client, document, question, tokens)
        if self._client is None:
            self._client = self._stand.make_client(self.source(None), precision=self._precision)
        return self._ask(self._client, document, question, tokens)

    def _ask(self, client: Client, document: Document, question: str, tokens: int) -> Reading:
        watch = Stopwatch()
        answer = client.ask(document.text, question, max_new_tokens=tokens, do_sample=False)
        report = answer.report
        said = f"{report.reason}: {report.detail}" if report.reason else report.local_refused
        return Reading(answer.token_ids, report.seconds["first_token"], watch.cpu_s, self.reused(report), said[:300])

    def reused(self, report: Report) -> int:
        """Tokens that came from where this way is about."""
        return report.tokens_reused

    def renew(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def stored(self, document: Document) -> Sequence[Stored]:
        """Its blocks, in the document's order."""
        tag, names = self._names(document)
        return [self.stored_at(block_key(tag, block.address)) for block in names.blocks]

    def stored_at(self, key: str) -> Stored:
        return stored_file(Path(self.origin) / key)

    def other_weights(self, folder: Path | None) -> None:
        self._stand.use_weights(folder)
        self.renew()

    def _names(self, document: Document) -> tuple[ModelTag, PrefixNames]:
        identity = replace(self._stand.loaded.identity, precision=self._precision)
        ids = self._stand.client.encode(document.text).token_ids
        return identity.tag, PrefixNames.of(identity, Namespace.public(), ids)


class ThroughEdge(Ours):
    """An edge process before a folder. A renewed one has an empty cache."""

    def __init__(self, stand: Stand, folder: Path, origin: str, precision: str = PRECISION_NATIVE) -> None:
        super().__init__(stand, f"kvcdn {precision}, edge", origin, precision)
        self._folder = folder
        self._caches = 0
        self._running = contextlib.ExitStack()
        self._edge: RunningEdge | None = None

    @property
    def edge(self) -> RunningEdge:
        """The edge, started when it is first asked for: by then there is an origin."""
        if self._edge is None:
            self._caches += 1
            cache = self._folder / f"{self._precision}-{self._caches}"
            self._edge = self._running.enter_context(launch_edge(origin=self.origin, cache_dir=cache, log_level="error"))
        return self._edge

    @property
    def server(self) -> Server:  # type: ignore[override] # known when the edge runs
        edge = self.edge
        return Server(edge.port, lambda: [edge.pid])

    def source(self, port: int | None) -> Source:
        return open_source(f"http://{HOST}:{port or self.edge.port}")

    def renew(self) -> None:
        super().renew()
        self._running.close()
        self._edge = None

    def close(self) -> None:
        """Ends the edge."""
        self.renew()


class FromS3(Ours):
    """A bucket read without an edge. Credentials are in the environment."""

    def __init__(self, stand: Stand, bucket: Bucket) -> None:
        super().__init__(stand, "kvcdn native, S3 without an edge", bucket.url("kvcdn"))
        self._bucket = bucket
        self.server = bucket.server

    def source(self, port: int | None) -> Source:
        return open_source(self._bucket.url("kvcdn", port))

    def stored_at(self, key: str) -> Stored:
        return self._bucket.stored(f"kvcdn/{key}")


class FromLocalStore(Ours):
    """This host's local store, which fetched everything before; behind it the origin's folder."""

    def __init__(self, stand: Stand, folder: Path, origin: str) -> None:
        super().__init__(stand, "kvcdn native, local store", origin)
        self._store = LocalStore(folder)

    def source(self, port: int | None) -> Source:
        del port  # nothing is sent
        return open_source(self.origin)

    def keep(self, document: Document) -> None:
        super().keep(document)
        with self._stand.make_client(self.source(None), local=self._store) as client:
            client.ask(document.text, QUESTION, max_new_tokens=1, do_sample=False)

    def read(self, document: Document, question: str, tokens: int, *, port: int | None = None) -> Reading:
        del port
        if self._client is None:
            self._client = self._stand.make_client(self.source(None), local=self._store)
        return self._ask(self._client, document, question, tokens)

    def reused(self, report: Report) -> int:
        return report.tokens_local

    def stored(self, document: Document) -> Sequence[Stored]:
        tag, names = self._names(document)
        mapped = self._store.find(tag, names.blocks[-1].address)
        if mapped is None:
            raise KvcdnError(f"the local store does not hold {document.name}")
        return [stored_file(self._store.folder / "prefixes" / mapped.name)]
