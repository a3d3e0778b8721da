"""A small S3 server that ignores conditions: a second PUT overwrites. No signatures are checked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from support.waiting import WAIT_SECONDS


@contextlib.contextmanager
def lax_s3(*, skew_seconds: float = 0.0) -> Iterator[str]:
    """Its endpoint, until the block ends; every bucket exists. Its clock is off by `skew_seconds`."""
    handler = type("Handler", (_Handler,), {"objects": {}, "skew": skew_seconds})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    objects: dict[str, tuple[bytes, float]]
    skew: float
    protocol_version = "HTTP/1.1"
    timeout = WAIT_SECONDS

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.objects[self._key()] = (data, time.time() + self.skew)
        self._answer(200, b"", {"ETag": '"x"'})

    def do_DELETE(self) -> None:
        self.objects.pop(self._key(), None)
        self._answer(204, b"")

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if "list-type" in parse_qs(parts.query):
            self._list(parse_qs(parts.query).get("prefix", [""])[0])
            return
        found = self.objects.get(self._key())
        if found is None and parts.path.count("/") > 1:
            self._answer(404, b"")
            return
        data, modified = found or (b"", 0.0)
        headers = {"Last-Modified": formatdate(modified, usegmt=True), "ETag": '"x"'}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, data, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        self._answer(206, part, headers)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).split("/", 2)[-1]

    def _list(self, prefix: str) -> None:
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
            f"<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, (data, _) in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
