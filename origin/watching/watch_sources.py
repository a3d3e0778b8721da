"""Sources of watches: which documents a folder, a list of URLs or a sitemap names, and whether one has changed."""

from __future__ import annotations

import io
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import ParseError

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import iterparse

from kvcdn.errors import NotFoundError, UnavailableError, UsageError
from kvcdn.origin.jobs.fetching import NO_VALIDATORS, Validators, fetch_bytes
from kvcdn.origin.publishing.sources import list_documents
from kvcdn.origin.watching.watch_settings import WatchKind, WatchSettings

MAX_DOCUMENTS = 50_000
"""Of one watch: what one sitemap may name (sitemaps.org)."""

MAX_LISTING_BYTES = 50 << 20
"""Of a list or a sitemap, also when it is unpacked (sitemaps.org)."""

MAX_SITEMAPS = 50
"""That one index may name and that are read."""

MAX_URL_CHARACTERS = 2048

MAX_ELEMENTS = 40 * MAX_DOCUMENTS
"""Of a sitemap: a page with its date and translations has some twenty. More would take minutes to pass over."""

MAX_DEPTH = 32
"""Levels of a sitemap's elements: it has three, and extensions a few more."""

SETTLE_SECONDS = 2.0
"""A file that changed so recently may be in the middle of being written: it is read at the next look."""

_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Seen:
    """A document's bytes; None where they are what `validators` told before."""

    data: bytes | None
    validators: Validators


class WatchSource:
    """One watch's documents. `resolve` says where a URL's name may lead, `limit` how many bytes a document may have."""

    def __init__(self, watch: WatchSettings, resolve: Callable[[str, int], str], limit: int) -> None:
        self._watch, self._resolve, self._limit = watch, resolve, limit

    def documents(self) -> list[str]:
        """The names of its documents, in order: paths, or URLs. Raises a KvcdnError where there is none, or none can be told.

        An empty source is no answer: a folder that is not mounted, a site that is being set up.
        """
        match self._watch.kind:
            case WatchKind.FOLDER:
                folder = Path(self._watch.source).expanduser()
                if not folder.is_dir():
                    raise NotFoundError(f"there is no folder {folder}")
                found = list_documents(str(folder))
            case WatchKind.LIST:
                found = self._listed()
            case WatchKind.SITEMAP:
                found = self._mapped()
        if not found:
            raise NotFoundError(f"{self._watch.source} names no document")
        if len(found) > MAX_DOCUMENTS:
            raise UsageError(f"{self._watch.source} names more than {MAX_DOCUMENTS:,} documents", hint="make several watches")
        return sorted(set(found))

    def look(self, document: str, known: Validators) -> Seen | None:
        """The document, if it is another than `known` tells; None where it is not to be read now. Raises a KvcdnError."""
        if _is_url(document):
            fetched = fetch_bytes(document, resolve=self._resolve, limit=self._limit, known=known)
            return Seen(None if fetched.unchanged else fetched.data, fetched.validators)
        path = Path(document)
        try:
            before = path.stat()
            validators = Validators(modified=f"{before.st_mtime_ns} {before.st_size} {before.st_ino}")
            if validators == known:
                return Seen(None, known)
            if before.st_size > self._limit:
                raise UsageError(f"{document} is larger than {self._limit:,} bytes")
            with path.open("rb") as file:
                data = file.read(self._limit + 1)
            after = path.stat()
        except FileNotFoundError:
            raise NotFoundError(f"there is no document at {document}") from None
        except OSError as error:
            raise UnavailableError(f"cannot read {document}: {error.strerror}") from None
        still = (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
        fresh = 0 <= time.time() - before.st_mtime < SETTLE_SECONDS  # a date to come tells nothing: another machine's clock
        return Seen(data, validators) if still and not fresh else None

    def _listed(self) -> list[str]:
        urls: list[str] = []
        for line in io.StringIO(self._text()):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            url = line.split(maxsplit=1)[0]
            if not _is_url(url) or len(url) > MAX_URL_CHARACTERS:
                raise UsageError(f"{self._watch.source} names {url[:80]!r}, which is no http or https URL")
            urls.append(url)
            if len(urls) > MAX_DOCUMENTS:
                break
        return urls

    def _text(self) -> str:
        source = self._watch.source
        if _is_url(source):
            data = fetch_bytes(source, resolve=self._resolve, limit=MAX_LISTING_BYTES).data
        else:
            try:
                with Path(source).expanduser().open("rb") as file:
                    data = file.read(MAX_LISTING_BYTES + 1)
            except OSError as error:
                raise UnavailableError(f"cannot read {source}: {error.strerror}") from None
            if len(data) > MAX_LISTING_BYTES:
                raise UsageError(f"{source} is larger than {MAX_LISTING_BYTES:,} bytes")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(f"{source} is not UTF-8 text") from None

    def _mapped(self) -> list[str]:
        pages, maps = self._sitemap(self._watch.source)
        if len(maps) > MAX_SITEMAPS:
            raise UsageError(f"{self._watch.source} names more than {MAX_SITEMAPS} sitemaps", hint="watch them one by one")
        for url in maps:
            pages += self._sitemap(url)[0]
            if len(pages) > MAX_DOCUMENTS:
                break
        return pages

    def _sitemap(self, url: str) -> tuple[list[str], list[str]]:
        """The pages and the further sitemaps that one names, of its own host."""
        data = fetch_bytes(url, resolve=self._resolve, limit=MAX_LISTING_BYTES, known=NO_VALIDATORS).data
        host = urlsplit(self._watch.source).netloc.lower()
        pages: list[str] = []
        maps: list[str] = []
        for kind, found in read_sitemap(data, url):
            try:
                fits = _is_url(found) and len(found) <= MAX_URL_CHARACTERS and urlsplit(found).netloc.lower() == host
            except ValueError:
                fits = False
            if fits:  # a sitemap speaks for its own host only (sitemaps.org)
                (pages if kind == "url" else maps).append(found)
            if len(pages) > MAX_DOCUMENTS or len(maps) > MAX_SITEMAPS:
                break
        return pages, maps


def read_sitemap(data: bytes, what: str) -> Iterator[tuple[str, str]]:
    """`url` or `sitemap`, and the address, of every entry of a sitemap or an index, packed or not. Raises UsageError.

    No document type, entity or external reference is taken (defusedxml).
    """
    try:
        path: list[Any] = []
        names: list[str] = []
        elements = 0
        for event, element in iterparse(io.BytesIO(_unpacked(data, what)), events=("start", "end"), forbid_dtd=True):
            if event == "start":
                elements += 1
                if elements > MAX_ELEMENTS:
                    raise UsageError(f"{what} has more than {MAX_ELEMENTS:,} elements")
                path.append(element)
                names.append(element.tag.rpartition("}")[2])
                if len(path) > MAX_DEPTH:
                    raise UsageError(f"{what} is not a sitemap: it is {MAX_DEPTH} levels deep, and more")
                continue
            if names[1:] in (["url", "loc"], ["sitemap", "loc"]) and element.text:
                yield names[1], element.text.strip()
            path.pop()
            names.pop()
            element.clear()
            if path:
                path[-1].remove(element)  # or millions of empty ones would stay
    except (DefusedXmlException, ParseError, ValueError, LookupError) as error:
        raise UsageError(f"{what} is not a sitemap: {type(error).__name__}") from None


def _unpacked(data: bytes, what: str) -> bytes:
    if not data.startswith(_GZIP):
        return data
    inflater = zlib.decompressobj(_GZIP_WINDOW)
    try:
        plain = inflater.decompress(data, MAX_LISTING_BYTES)
    except zlib.error:
        raise UsageError(f"{what} is packed, and damaged") from None
    if inflater.unconsumed_tail:
        raise UsageError(f"{what} is larger than {MAX_LISTING_BYTES:,} bytes when it is unpacked")
    return plain


def _is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))
