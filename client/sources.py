"""Opening sources: what a URL or a path names, as a source of blocks."""

from __future__ import annotations

from kvcdn.client.transport import EdgeSource, Source, StoreSource
from kvcdn.stores import open_store


def open_source(url: str, *, endpoint: str | None = None, token: str | None = None) -> Source:
    """A source of blocks: an edge (`http://...`), or an origin read directly (a folder, `s3://...`). Raises UsageError."""
    if url.startswith(("http://", "https://")):
        return EdgeSource(url, token)
    return StoreSource(open_store(url, endpoint=endpoint, token=token))
