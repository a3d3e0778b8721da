"""transformers' own DynamicCache kept as a file: by torch.save or safetensors, fetched from nginx or from S3.

Files are named by what people call the model and the document, as one names files.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import urllib3
from transformers import DynamicCache

from kvcdn.cli.bench.against.bucket import Bucket
from kvcdn.cli.bench.against.stand import Stand
from kvcdn.cli.bench.against.way import Checks, Document, Reading, Server, Stopwatch, Stored, stored_file
from kvcdn.cli.bench.processes import with_children
from kvcdn.cli.seaweed import HOST
from kvcdn.errors import UnavailableError

Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [1, heads, tokens, dim]."""


def save_torch(rows: Rows) -> bytes:
    """By torch.save, which keeps views' whole storage: they are copied first."""
    out = io.BytesIO()
    torch.save([tuple(tensor.clone() for tensor in layer) for layer in rows], out)
    return out.getvalue()


def load_torch(data: bytes) -> Rows:
    """By torch.load, for tensors only."""
    return [tuple(layer) for layer in torch.load(io.BytesIO(data), weights_only=True)]


def save_safetensors(rows: Rows) -> bytes:
    """As safetensors, a tensor for the keys and one for the values of each layer."""
    named = {f"{place}.{index}": layer[at].contiguous() for index, layer in enumerate(rows) for at, place in enumerate("kv")}
    data: bytes = safetensors.torch.save(named)
    return data


def load_safetensors(data: bytes) -> Rows:
    """The reverse."""
    found = safetensors.torch.load(data)
    return [(found[f"k.{index}"], found[f"v.{index}"]) for index in range(len(found) // 2)]


class KeptFiles:
    """What the ways below have in common: prefill as the library does, a file of it, and an answer from the file."""

    lossy = False
    setup = ""

    def __init__(self, stand: Stand, name: str, suffix: str) -> None:
        self.name = name
        self._stand = stand
        self._suffix = suffix
        self._save, self._load = {
            "pt": (save_torch, load_torch),
            "safetensors": (save_safetensors, load_safetensors),
        }[suffix]
        integrity = "none: its CRC-32 is not checked" if suffix == "pt" else "offsets and sizes in its header"
        self.checks = Checks("model's name and document's name", integrity, "none", "none", "none")

    def file_name(self, document: Document) -> str:
        return f"{self._stand.model_name}-{document.name}.{self._suffix}"

    def bytes_of(self, document: Document) -> bytes:
        """The file of a document's KV."""
        return self._save(self._stand.stock_rows(document))

    def answer(self, document: Document, question: str, tokens: int, fetch: Callable[[], Any]) -> Reading:
        """Fetches, loads and generates. What libraries raise is what the caller is told."""
        watch = Stopwatch()
        try:
            rows = fetch()
            cache = DynamicCache(config=self._stand.client.model.config)
            for layer, (keys, values) in enumerate(rows):
                cache.update(keys, values, layer)
            reused = cache.get_seq_length()
            if reused != document.tokens:
                return Reading(said=f"the file holds {reused} tokens of {document.tokens}")
            return self._stand.answer(watch, document, question, tokens, cache=cache, reused=reused)
        except Exception as error:  # noqa: BLE001 - any of the libraries' errors is a loud failure, and counted as one
            return Reading(said=f"{type(error).__name__}: {error}"[:300])

    def load(self, data: bytes) -> Rows:
        return self._load(data)

    def renew(self) -> None:
        """Nothing is remembered."""

    def other_weights(self, folder: Path | None) -> None:
        self._stand.use_weights(folder)


class NginxFiles(KeptFiles):
    """Files in a folder that nginx serves."""

    def __init__(self, stand: Stand, suffix: str, folder: Path, url: str, pid: int) -> None:
        library = "torch.save" if suffix == "pt" else "safetensors"
        super().__init__(stand, f"{library}, nginx", suffix)
        reader = "torch.load(weights_only=True)" if suffix == "pt" else "safetensors.torch.load"
        self.setup = f"sendfile and tcp_nopush, one GET over a kept connection, {reader} from memory"
        self._folder = folder
        self._pools = urllib3.PoolManager(retries=False)
        self.server = Server(int(url.rsplit(":", 1)[1]), lambda: with_children(pid))

    def keep(self, document: Document) -> None:
        (self._folder / self.file_name(document)).write_bytes(self.bytes_of(document))

    def read(self, document: Document, question: str, tokens: int, *, port: int | None = None) -> Reading:
        url = f"http://{HOST}:{port or self.server.port}/{self.file_name(document)}"

        def fetch() -> Rows:
            answer = self._pools.request("GET", url)
            if answer.status != HTTPStatus.OK:
                raise UnavailableError(f"HTTP {answer.status}")
            return self.load(answer.data)

        return self.answer(document, question, tokens, fetch)

    def renew(self) -> None:
        """Connections through a link that is gone are dropped."""
        self._pools.clear()

    def stored(self, document: Document) -> Sequence[Stored]:
        return [stored_file(self._folder / self.file_name(document))]


class S3Files(KeptFiles):
    """Objects in a bucket, downloaded as boto3's guide says: `download_file`, then a load from the file."""

    def __init__(self, stand: Stand, folder: Path, bucket: Bucket) -> None:
        super().__init__(stand, "safetensors, S3 download", "safetensors")
        self.setup = "boto3's download_file with its defaults (parallel ranges), then safetensors.torch.load_file"
        self._folder = folder
        self._bucket = bucket
        self.server = bucket.server

    def keep(self, document: Document) -> None:
        self._bucket.put(self.file_name(document), self.bytes_of(document))

    def read(self, document: Document, question: str, tokens: int, *, port: int | None = None) -> Reading:
        target = self._folder / self.file_name(document)

        def fetch() -> Any:
            self._bucket.download(target.name, target, port)
            found = safetensors.torch.load_file(target)
            return [(found[f"k.{index}"], found[f"v.{index}"]) for index in range(len(found) // 2)]

        try:
            return self.answer(document, question, tokens, fetch)
        finally:
            target.unlink(missing_ok=True)

    def stored(self, document: Document) -> Sequence[Stored]:
        return [self._bucket.stored(self.file_name(document))]
