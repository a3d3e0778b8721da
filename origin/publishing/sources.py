"""Sources of documents: a text file, a folder of them, a URL, or standard input. Always whole, always text."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3

from kvcdn.errors import NotFoundError, UnavailableError, UsageError

MAX_DOCUMENT_BYTES = 256 << 20
"""Some 60 million tokens: beyond any model's positions; a guard against publishing a disk image."""

_BINARY_PROBE_BYTES = 1 << 16
"""A NUL in this much of a file's front marks it as binary, as grep and git do."""

_URL_TIMEOUT = urllib3.Timeout(connect=10, read=60)

TEXT_SUFFIXES = frozenset(
    (".txt", ".md", ".rst", ".py", ".json", ".html", ".csv", ".toml", ".yaml", ".yml", ".xml", ".c", ".h")
)
"""What a folder contributes; other files in it are left alone."""


@dataclass(frozen=True)
class Document:
    """A text to publish and where it came from."""

    name: str
    text: str

    def messages(self) -> list[dict[str, Any]]:
        """The document as the opening of a chat: the messages of a JSON file as they are, other text as a system message."""
        return self._chat()[0]

    def tools(self) -> list[dict[str, Any]]:
        """The tools that a chat's templates write in front of its messages: those of a JSON file that is a request's body."""
        return self._chat()[1]

    def _chat(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        if not self.name.endswith(".json"):
            return [{"role": "system", "content": self.text}], []
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.name} is not JSON: {error}") from None
        messages, tools = (value.get("messages"), value.get("tools") or []) if isinstance(value, dict) else (value, [])
        if (
            isinstance(messages, list)
            and messages
            and all(_is_message(item) for item in messages)
            and isinstance(tools, list)
            and all(isinstance(tool, dict) for tool in tools)
        ):
            return messages, tools
        raise UsageError(
            f"{self.name} is not a chat",
            hint='with --chat a .json file holds [{"role": "system", "content": "..."}, ...], or such "messages" and "tools"',
        )


def list_documents(source: str) -> list[str]:
    """What `source` holds, each to be given to `read_document`: itself, or, for a folder, its text files.

    Raises NotFoundError.
    """
    if source == "-" or _is_url(source):
        return [source]
    path = Path(source).expanduser()
    if not path.exists():
        raise NotFoundError(f"there is no document at {source}")
    if not path.is_dir():
        return [str(path)]
    files = sorted(item for item in path.rglob("*") if item.suffix.lower() in TEXT_SUFFIXES and item.is_file())
    if not files:
        raise NotFoundError(f"the folder {source} holds no text files", hint=f"looked for {', '.join(sorted(TEXT_SUFFIXES))}")
    return [str(file) for file in files]


def read_document(source: str) -> Document:
    """The document at `source`: a file, an http(s) URL or `-` for standard input.

    Raises a KvcdnError that names what is wrong.
    """
    if source == "-":
        return decode_document("standard input", sys.stdin.buffer.read(MAX_DOCUMENT_BYTES + 1))
    if _is_url(source):
        return decode_document(source, _download(source))
    path = Path(source).expanduser()
    if path.is_dir():
        raise UsageError(f"{source} is a folder", hint="name one document")
    return decode_document(source, _read_file(path))


def _is_url(source: str) -> bool:
    return urlsplit(source).scheme in ("http", "https")


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_DOCUMENT_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"there is no document at {path}") from None
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror}") from None


def _download(url: str) -> bytes:
    try:
        with (
            urllib3.PoolManager(retries=urllib3.Retry(3, redirect=5, backoff_factor=0.2), timeout=_URL_TIMEOUT) as pool,
            pool.request("GET", url, preload_content=False) as response,
        ):
            if response.status == 404:  # noqa: PLR2004 - HTTP's own number
                raise NotFoundError(f"{url} answers 404: there is no such document")
            if response.status != 200:  # noqa: PLR2004 - as above
                raise UnavailableError(f"{url} answers {response.status} {response.reason}")
            return response.read(MAX_DOCUMENT_BYTES + 1)
    except urllib3.exceptions.HTTPError as error:
        raise UnavailableError(f"cannot download {url}: {error}") from None


def decode_document(name: str, data: bytes) -> Document:
    """The text in `data`. Raises UsageError for what is too large, binary, not UTF-8, or empty."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise UsageError(f"{name} is larger than {MAX_DOCUMENT_BYTES >> 20} MiB; no model reads that much")
    if b"\x00" in data[:_BINARY_PROBE_BYTES]:
        raise UsageError(f"{name} is a binary file, not text", hint="extract its text first, for example with pdftotext")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x})",
            hint="convert it, for example with iconv",
        ) from None
    if not text.strip():
        raise UsageError(f"{name} is empty: there is nothing to publish")
    return Document(name, text)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
