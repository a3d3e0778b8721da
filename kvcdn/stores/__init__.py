"""Where objects lie: implementations of `kvcdn.store.BlobStore`. `open_store` picks one by its URL."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvcdn.errors import UsageError
from kvcdn.store import BlobStore

__all__ = ["open_store"]

FORMS = "a folder, file:///folder, s3://bucket/prefix, https://host/prefix"


def open_store(url: str, *, endpoint: str | None = None, token: str | None = None) -> BlobStore:
    """The store at `url`.

    Forms: a path or `file://`; `s3://bucket/prefix`, with `endpoint` for a server that is not AWS; `http(s)://`, with `token`
    where it asks for a bearer token, which can only be read; `memory:`, a new and empty one that ends with the process. Raises
    UsageError for any other form, and what the store's constructor raises.
    """
    scheme = _scheme(url)
    if endpoint is not None and scheme != "s3":
        raise UsageError(f"an endpoint belongs to an s3:// store, not to {_shown(url)}")
    if token is not None and scheme not in ("http", "https"):
        raise UsageError(f"a token belongs to an http:// or https:// store, not to {_shown(url)}")
    match scheme:
        case "" | "file":
            from kvcdn.stores.folder import FolderStore  # noqa: PLC0415 - each kind loads only what it needs

            return FolderStore(_path(url))
        case "s3":
            from kvcdn.stores.s3 import S3Store  # noqa: PLC0415 - as above

            return S3Store.from_url(url, endpoint=endpoint)
        case "http" | "https":
            from kvcdn.stores.http import HttpStore  # noqa: PLC0415 - as above

            return HttpStore(url, token=token)
        case "memory":
            from kvcdn.stores.memory import MemoryStore  # noqa: PLC0415 - as above

            return MemoryStore()
    raise UsageError(f"{_shown(url)} is not a place for objects", hint=f"name one of: {FORMS}")


def _scheme(url: str) -> str:
    """The scheme in lower case; empty for a path. Single letters are no schemes, and neither is a name before a plain colon."""
    if url == "memory:":
        return "memory"
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", url)
    return found.group(1).lower() if found else ""


def _path(url: str) -> Path:
    if not url:
        raise UsageError("an empty name is not a place for objects", hint=f"name one of: {FORMS}")
    if not _scheme(url):
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise UsageError(f"{_shown(url)} is not a local folder", hint="write file:///folder, with three slashes")
    return Path(unquote(parts.path))


def _shown(url: str) -> str:
    """`url` without what may be a password."""
    return re.sub(r"//[^/@]*@", "//", url)[:200]
