"""`kvcdn ls`: what is published at an origin, as far as it shows without keys."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcdn.cli.inspect import SHORT, day, describe_manifest
from kvcdn.cli.options import AsJson, Endpoint, OwnOrigin, TrustFile, open_origin, trust_list
from kvcdn.cli.output import note, print_text, size, ticking
from kvcdn.errors import UsageError

if TYPE_CHECKING:
    from kvcdn.manifest import Manifest
    from kvcdn.origin.upkeep.catalog import Listed
    from kvcdn.signing import TrustList

_PAGE_ROWS = 500
"""Rows whose widths decide how a table's columns are set; the rows after them may stick out."""

_SPOOL_BYTES = 8 << 20
"""JSON beyond this goes through a temporary file."""

_HEADINGS = ["ADDRESS", "MODEL", "TOKENS", "STORED", "CREATED", "TRUSTED", "LABEL"]


def list_documents(
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Only documents of this model: its name, tag or fingerprint.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Only documents with these words in their label.")] = None,
    publisher: Annotated[
        str | None,
        typer.Option(help="Only documents by this publisher: the key, its first digits, or its name on your trust list."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many; where more follow, tells how to go on.")] = None,
    after: Annotated[str | None, typer.Option(help="Go on behind this object key, the `next` of the page before.")] = None,
    trust: TrustFile = None,
    *,
    expired: Annotated[
        bool, typer.Option("--expired", help="Only documents past their expiry date; kvcdn gc removes them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List what is published at an origin. Texts cannot be told from it; labels, where publishers set them, can."""
    from kvcdn.origin.upkeep.catalog import list_published, tag_of  # noqa: PLC0415 - see kvcdn.cli

    store, trusted = open_origin(origin, endpoint), trust_list(trust)
    if after is not None and not after.startswith("v1/"):
        raise UsageError(f"{after[:80]!r} is not an object key", hint="take the key that the page before told as `next`")
    tag = tag_of(model) if model is not None else None

    def wanted(manifest: Manifest) -> bool:
        return (
            (model is None or tag is not None or manifest.model_name == model)
            and (label is None or label.casefold() in manifest.label.casefold())
            and (publisher is None or _is_by(manifest, publisher, trusted))
            and (not expired or (manifest.expires is not None and manifest.expires <= time.time()))
        )

    page = _Page(_documents(list_published(store, tag=tag, after=after or "", progress=ticking()), wanted, trusted), limit)
    if as_json:
        _print_json(store.url, page)
        return
    _print_rows(page)
    if page.next_key:
        note(f"more follow: --after {page.next_key}")
    elif not page.last_key:
        chosen = model or label or publisher or expired or after
        note(f"nothing at {store.url} is of that kind" if chosen else f"nothing is published at {store.url}")


class _Page:
    """Up to `limit` documents; afterwards `next_key` says whether more follow, by naming the last that was shown."""

    def __init__(self, documents: Iterator[dict[str, Any]], limit: int | None) -> None:
        self._documents = documents
        self._limit = limit
        self.last_key: str | None = None
        self.next_key: str | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for count, document in enumerate(self._documents):
            if count == self._limit:
                self.next_key = self.last_key
                return
            self.last_key = document["object"]
            yield document


def _documents(listing: Iterator[Listed], wanted: Callable[[Manifest], bool], trusted: TrustList) -> Iterator[dict[str, Any]]:
    for listed in listing:
        if listed.manifest is None:
            note(f"kvcdn: {listed.problem}")
        elif wanted(listed.manifest):
            yield {"object": listed.info.key, **describe_manifest(listed.manifest, trusted)}


def _is_by(manifest: Manifest, publisher: str, trusted: TrustList) -> bool:
    key = manifest.publisher
    if key is None:
        return False
    return trusted.names.get(key) == publisher or key.text.startswith("ed25519:" + publisher.removeprefix("ed25519:").lower())


def _print_json(url: str, page: _Page) -> None:
    """One object, however many documents: put together outside of memory, and shown only once it is whole."""
    with tempfile.SpooledTemporaryFile(_SPOOL_BYTES, "w+", encoding="utf-8") as spool:
        spool.write(f'{{"origin": {json.dumps(url, ensure_ascii=False)}, "documents": [')
        for count, document in enumerate(page):
            spool.write(", " if count else "")
            spool.write(json.dumps(document, ensure_ascii=False))
        spool.write(f'], "next": {json.dumps(page.next_key)}}}\n')
        spool.seek(0)
        shutil.copyfileobj(spool, sys.stdout)
    sys.stdout.flush()


def _print_rows(page: _Page) -> None:
    rows = (
        [
            str(entry["address"])[:SHORT],
            str(entry["model"]),
            f"{entry['tokens']:,}",
            size(entry["stored_bytes"]),
            day(entry["created"]),
            "yes" if entry["trusted"] else "no",
            str(entry["label"]),
        ]
        for entry in page
    )
    widths: list[int] = []
    while chunk := list(islice(rows, _PAGE_ROWS)):
        if not widths:
            chunk = [_HEADINGS, *chunk]
            widths = [max(len(row[column]) for row in chunk) for column in range(len(_HEADINGS))]
        for row in chunk:
            print_text("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
