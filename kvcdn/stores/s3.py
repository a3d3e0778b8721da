"""An S3 store: objects in a bucket of AWS, or of any server that speaks S3 and honours `If-None-Match: *`.

What is created stays: a conditional PUT makes the server decide between racing writers. A lost reply makes it look as if
somebody else had won (the retry meets our own object), so after a retry the object is compared with our bytes.
"""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from http import HTTPStatus
from operator import itemgetter
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvcdn.digest import Buffer
from kvcdn.errors import KvcdnError, NotFoundError, UnavailableError, UsageError
from kvcdn.store import STREAM_CHUNK_BYTES, BlobInfo, check_key, is_behind
from kvcdn.stores import s3_client
from kvcdn.stores.body import Body, BrokenBodyError, body_extent, pause, resumed
from kvcdn.stores.s3_errors import Refusal, is_silent, refusal, required, translated, was_retried
from kvcdn.stores.s3_plain import Answer
from kvcdn.stores.span import Pieces, Span, nothing

MULTIPART_BYTES = 64 << 20
"""Larger objects go up in parts: a broken connection then costs one part, not the object."""

PART_BYTES = 16 << 20
"""AWS's advice is 8 to 16 MiB."""

MAX_PARTS = 10_000
"""S3's own limit."""

CONFLICT_ATTEMPTS = 5
"""A 409 says that another writer of the same key is at work; it has then won or failed within a few pauses."""

READ_BYTES = 256 * 1024
"""One read waits for so much: little enough that a slow server is noticed."""

MAX_PREFIX_CHARACTERS = 256
"""With the longest key this stays below S3's 1,024 bytes."""

LIST_HINT = "use a version of this server that gives NextContinuationToken"

OPTIONS = frozenset(("endpoint", "region", "profile", "request_payer"))
"""Of a URL, behind its question mark."""

CACHE_CONTROL = "public, max-age=31536000, immutable"
"""FORMAT.md 7, for web servers and CDNs that pass the bucket's headers on."""


class S3Store:
    """A BlobStore under a prefix of a bucket."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        request_payer: str | None = None,
    ) -> None:
        """Credentials, and what is not given, come from where AWS's own tools look. Sends no request.

        With `request_payer="requester"` whoever asks pays for requests and traffic, in a bucket whose owner does not.

        Raises UsageError for a malformed bucket, prefix, endpoint or payer, and where there are no credentials.
        """
        self._bucket = s3_client.checked_bucket(bucket)
        self._prefix = _checked_prefix(prefix)
        if request_payer not in (None, s3_client.REQUESTER):
            raise UsageError(
                f"request_payer={request_payer[:40]} is not known", hint="write request_payer=requester, or nothing"
            )
        self._options = {"endpoint": endpoint, "region": region, "profile": profile, "request_payer": request_payer}
        with translated(self.url, ""):
            connected = s3_client.connect(endpoint, region, profile, pays=request_payer is not None)
            self._plain = s3_client.plain_reader(connected, bucket)
        self._client, self._login = connected.client, connected.login
        self._ordered = s3_client.is_aws(self._client.meta.endpoint_url)
        self._bucket_seen = False

    @classmethod
    def from_url(cls, url: str, *, endpoint: str | None = None) -> S3Store:
        """The store at `s3://bucket/prefix?endpoint=...&region=...`, with OPTIONS; an `endpoint` given apart wins."""
        try:
            parts = urlsplit(url)
            options = dict(
                parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), max_num_fields=len(OPTIONS))
            )
        except ValueError:
            raise UsageError(f"{url[:200]!r} is not an s3:// URL", hint=s3_client.URL_HINT) from None
        if unknown := options.keys() - OPTIONS:
            raise UsageError(f"an s3:// URL has no option {min(unknown)[:40]!r}", hint=f"it has {', '.join(sorted(OPTIONS))}")
        if parts.fragment or parts.scheme.lower() != "s3":
            raise UsageError(f"{url[:200]!r} is not an s3:// URL that we know to read", hint=s3_client.URL_HINT)
        if endpoint is not None:
            options["endpoint"] = endpoint
        return cls(parts.netloc, parts.path, **options)

    @property
    def url(self) -> str:
        path = f"/{self._prefix}".rstrip("/")
        options = "&".join(f"{name}={value}" for name, value in self._options.items() if value)
        return f"s3://{self._bucket}{path}{'?' if options else ''}{options}"

    def __repr__(self) -> str:
        return f"S3Store({self.url})"

    def stat(self, key: str) -> BlobInfo | None:
        name = self._name(key)
        with self._translated(f"looking up {key}"):
            try:
                found = self._head(name)
            except self._client.exceptions.ClientError as error:
                if refusal(error) is not Refusal.MISSING:
                    raise
                self._check_bucket()
                return None
        size, modified = required(self.url, found, "ContentLength", "LastModified")
        return BlobInfo(key, int(size), modified.timestamp())

    def _head(self, name: str) -> Any:
        """What a HEAD says. Where it is refused without a reason, as it has no body, a GET tells why, or that it has passed."""
        try:
            return self._client.head_object(Bucket=self._bucket, Key=name)
        except self._client.exceptions.ClientError as error:
            if not is_silent(error):
                raise
        try:
            self._client.get_object(Bucket=self._bucket, Key=name, Range="bytes=0-0")["Body"].close()
        except self._client.exceptions.ClientError as error:
            if refusal(error) is not Refusal.RANGE:  # of an empty object
                raise
        return self._client.head_object(Bucket=self._bucket, Key=name)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return b"".join(self.stream(key, start, length))

    def stream(self, key: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        span = Span.of(start, length)
        check_key(key)
        body = None if span.empty else self._open(key, span, {})
        if body is None:
            self._check_end(key, span)
            return nothing()
        return Pieces(self._pieces(key, body, span), body.size)

    def create(self, key: str, pieces: Sequence[Buffer]) -> bool:
        # Spares the upload of what is there, and keeps a server that ignores If-None-Match from overwriting it.
        return self.stat(key) is None and self.create_unseen(key, pieces)

    def create_unseen(self, key: str, pieces: Sequence[Buffer]) -> bool:
        """As `create` without a look before: only the server keeps what is there. `kvcdn doctor` tries whether it does."""
        size = sum(map(len, pieces))
        for attempt in range(1, CONFLICT_ATTEMPTS + 1):
            with self._translated(f"writing {key} ({size:,} bytes)"):
                try:
                    (self._put if size <= MULTIPART_BYTES else self._put_parts)(self._name(key), pieces)
                    return True
                except self._client.exceptions.ClientError as error:
                    outcome = refusal(error)
                    # The retry of a request whose reply was lost meets the object, or finds the upload already completed; of
                    # a completion, somebody between us and the server may have retried.
                    again = outcome is Refusal.MISSING or (outcome is Refusal.EXISTS and was_retried(error))
                    if again and self._holds(key, pieces):
                        return True
                    if outcome is Refusal.EXISTS:
                        return False
                    if outcome not in (Refusal.CONFLICT, Refusal.DAMAGED) or attempt == CONFLICT_ATTEMPTS:
                        raise
            pause(attempt)
        raise AssertionError("the last attempt returns or raises")

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        if not _can_begin_keys(prefix):  # a server that tidies paths up would list something else
            return iter(())
        start, behind = (f"{self._prefix}/{part}" if self._prefix else part for part in (prefix, after))
        return self._flat(start, behind) if self._ordered else self._walk(start, behind)

    def delete(self, key: str) -> None:
        with self._translated(f"deleting {key}"):
            try:
                self._client.delete_object(Bucket=self._bucket, Key=self._name(key))
            except self._client.exceptions.ClientError as error:
                if refusal(error) is not Refusal.MISSING:  # as some servers say when a lost reply is asked for again
                    raise

    def _put(self, name: str, pieces: Sequence[Buffer]) -> None:
        data = b"".join(pieces)
        done = self._client.put_object(
            Bucket=self._bucket,
            Key=name,
            Body=data,
            IfNoneMatch="*",
            CacheControl=CACHE_CONTROL,
            ContentType="application/octet-stream",
            ChecksumCRC32=_crc32(data),
        )
        required(self.url, done, "ETag")

    def _put_parts(self, name: str, pieces: Sequence[Buffer]) -> None:
        target = {"Bucket": self._bucket, "Key": name}
        upload = self._client.create_multipart_upload(
            **target, CacheControl=CACHE_CONTROL, ContentType="application/octet-stream", ChecksumAlgorithm="CRC32"
        )
        (target["UploadId"],) = required(self.url, upload, "UploadId")
        size = max(PART_BYTES, -(-sum(map(len, pieces)) // MAX_PARTS))
        try:
            done = []
            for number, part in enumerate(_parts(pieces, size), start=1):
                checksum = _crc32(part)
                sent = self._client.upload_part(**target, PartNumber=number, Body=part, ChecksumCRC32=checksum)
                (tag,) = required(self.url, sent, "ETag")
                done.append({"PartNumber": number, "ETag": tag, "ChecksumCRC32": checksum})
            ended = self._client.complete_multipart_upload(**target, MultipartUpload={"Parts": done}, IfNoneMatch="*")
            if not ended.get("ETag"):  # the status comes before the server has put the parts together
                raise UnavailableError(f"{self.url}: the server did not say that {name} is whole", hint="try again later")
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell; a lifecycle rule removes what stays
                self._client.abort_multipart_upload(**target)
            raise

    def _holds(self, key: str, pieces: Sequence[Buffer]) -> bool:
        """Whether the object has exactly our bytes: then it is ours, as every block and manifest differs from all others."""
        info = self.stat(key)
        if info is None or info.size != sum(map(len, pieces)):
            return False
        theirs = _parts(self.stream(key), STREAM_CHUNK_BYTES)
        return all(one == other for one, other in zip(theirs, _parts(pieces, STREAM_CHUNK_BYTES), strict=True))

    def _open(self, key: str, span: Span, conditions: dict[str, str]) -> Body | None:
        """An answer that holds `span`, or None where the server says that the object ends before it."""
        options = conditions if span == Span(0, None) else conditions | {"Range": span.header}
        where = f"{self.url}: {key}"
        found = self._plain.get(self._name(key), options)
        if found is None:
            found = self._ask(key, options)
            self._plain.count(vain=found.status < HTTPStatus.BAD_REQUEST)
        match found.status:
            case HTTPStatus.NOT_FOUND:
                raise NotFoundError(f"{self.url} has no object {key}")
            case HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return None
            case HTTPStatus.PRECONDITION_FAILED:
                raise UnavailableError(f"{where}: the object changed while it was read")
        try:
            size, skip = body_extent(found.status, found.headers, span, where)
        except KvcdnError:
            found.stream.close()
            raise
        return Body(_reader(found.stream), found.stream.close, span.start, size, found.headers.get("ETag", ""), skip)

    def _ask(self, key: str, headers: dict[str, str]) -> Answer:
        """The answer that botocore gets: with retries, and in words where it is refused for good."""
        options = {name.replace("-", ""): value for name, value in headers.items()}
        with self._translated(f"reading {key}"):
            try:
                found = self._client.get_object(Bucket=self._bucket, Key=self._name(key), **options)
            except self._client.exceptions.ClientError as error:
                if refusal(error) in (Refusal.MISSING, Refusal.RANGE, Refusal.EXISTS):
                    return Answer(error.response["ResponseMetadata"]["HTTPStatusCode"], {}, None)
                raise
        told = {"Content-Length": "ContentLength", "Content-Range": "ContentRange", "ETag": "ETag"}
        answered = {header: str(found[name]) for header, name in told.items() if name in found}
        return Answer(found["ResponseMetadata"]["HTTPStatusCode"], answered, found["Body"])

    def _pieces(self, key: str, body: Body, span: Span) -> Generator[bytes, None, None]:
        def reopen(rest: Span) -> Body:
            again = self._open(key, rest, {"If-Match": body.etag} if body.etag else {})
            if again is None:
                raise UnavailableError(f"{self.url}: {key}: the object changed while it was read")
            return again

        return resumed(body, span, reopen, f"{self.url}: {key}")

    def _check_end(self, key: str, span: Span) -> None:
        """Whether it is true that nothing of `span` exists."""
        info = self.stat(key)
        if info is None:
            raise NotFoundError(f"{self.url} has no object {key}")
        if not span.empty and info.size > span.start:
            raise UnavailableError(f"{self.url}: refused the range {span.header} of {key}, which has {info.size:,} bytes")

    def _check_bucket(self) -> None:
        """A HEAD that finds nothing does not say whether the bucket exists. Asked once, so that a typing error is no miss."""
        if not self._bucket_seen:
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except self._client.exceptions.ClientError as error:
                if refusal(error) is Refusal.MISSING:
                    raise UnavailableError(f"{self.url}: there is no such bucket", hint=s3_client.BUCKET_HINT) from None
            self._bucket_seen = True

    def _flat(self, start: str, after: str) -> Iterator[BlobInfo]:
        """For servers that list in key order."""
        for page in self._pages(Prefix=start, **({"StartAfter": after} if after else {})):
            yield from self._infos(page)

    def _walk(self, start: str, after: str) -> Iterator[BlobInfo]:
        """For others: some list folder by folder, `a/b` before `a-b`. Holds the names of one folder per level, no more."""
        entries: dict[str, BlobInfo | None] = {}
        for page in self._pages(Prefix=start, Delimiter="/"):
            entries.update((self._name(info.key), info) for info in self._infos(page))
            entries.update((folder["Prefix"], None) for folder in page.get("CommonPrefixes", ()))
        for name, info in sorted(entries.items(), key=itemgetter(0)):
            if not is_behind(name, after):
                continue
            if info is not None:
                yield info
            elif name != start:
                yield from self._walk(name, after)

    def _pages(self, **options: str) -> Iterator[dict[str, Any]]:
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, **options))
        while True:
            with self._translated("listing"):
                page = next(pages, None)
            if page is None:
                return
            required(self.url, page, "IsTruncated")
            yield page
            # Without it the listing would end here without a word, and `gc` take what was not listed for not named.
            if page.get("IsTruncated") and not page.get("NextContinuationToken"):
                raise UnavailableError(f"{self.url}: the server says that its listing goes on, and not where", hint=LIST_HINT)

    def _infos(self, page: dict[str, Any]) -> Iterator[BlobInfo]:
        for item in page.get("Contents", ()):
            name, size, modified = required(self.url, item, "Key", "Size", "LastModified")
            key = name[len(self._prefix) + 1 if self._prefix else 0 :]
            with contextlib.suppress(UsageError):  # what is not a key is not ours
                yield BlobInfo(check_key(key), int(size), modified.timestamp())

    def _name(self, key: str) -> str:
        check_key(key)
        return f"{self._prefix}/{key}" if self._prefix else key

    def _translated(self, action: str) -> contextlib.AbstractContextManager[None]:
        return translated(self.url, action, self._login)


def _checked_prefix(prefix: str) -> str:
    prefix = prefix.strip("/")
    if len(prefix) > MAX_PREFIX_CHARACTERS:
        raise UsageError(f"the prefix of an s3:// store has at most {MAX_PREFIX_CHARACTERS} characters, not {len(prefix)}")
    return check_key(prefix) if prefix else ""


def _can_begin_keys(prefix: str) -> bool:
    with contextlib.suppress(UsageError):
        return not prefix or bool(check_key(prefix.removesuffix("/")))
    return False


def _crc32(data: bytes) -> str:
    """As S3 writes it: big-endian, base64. The server refuses bytes that changed on the way."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode("ascii")


def _parts(pieces: Iterable[Buffer], size: int) -> Iterator[bytes]:
    """The joined pieces cut into parts of `size` bytes, the last one shorter; joins no more than one part at a time."""
    waiting = bytearray()
    for piece in pieces:
        for position in range(0, len(piece), size):
            waiting += piece[position : position + size]
            if len(waiting) >= size:
                yield bytes(waiting[:size])
                del waiting[:size]
    if waiting:
        yield bytes(waiting)


def _reader(stream: Any) -> Callable[[int], bytes]:
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 - only who uses S3 pays for loading it
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - as above

    def read(size: int) -> bytes:
        try:
            data: bytes = stream.read(min(size, READ_BYTES))
        except (BotoCoreError, HTTPError, OSError) as error:
            raise BrokenBodyError(type(error).__name__) from error
        return data

    return read
