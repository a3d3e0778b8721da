"""Opening sources: what URLs or a path name, as a source of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvcdn.client.sources.fallback import FallbackSource
from kvcdn.client.sources.source import Source
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.sources.transport import EdgesSource
from kvcdn.errors import UsageError
from kvcdn.stores import open_store


def open_source(
    url: str | Sequence[str], *, endpoint: str | None = None, token: str | None = None, ca_file: str | None = None
) -> Source:
    """A source of blocks: an edge (`http://...`), or an origin read directly (a folder, `s3://...`).

    Of several URLs the edges share the work, and one origin among them serves what no edge can. `endpoint` is for S3; `token`
    and `ca_file` are for edges, see `EdgesSource`. Raises UsageError.
    """
    urls = [url] if isinstance(url, str) else list(url)
    edges = [one for one in urls if one.startswith(("http://", "https://"))]
    origins = [one for one in urls if one not in edges]
    if len(origins) > 1 or not urls:
        raise UsageError("a source is any number of edges (http://...), one origin (a folder, s3://...), or both")
    if not origins:
        return EdgesSource(edges, token, ca_file=ca_file)
    origin = StoreSource(open_store(origins[0], endpoint=endpoint))
    return FallbackSource(EdgesSource(edges, token, ca_file=ca_file), origin) if edges else origin
