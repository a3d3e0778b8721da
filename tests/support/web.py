"""A plain web server over a store: GET, HEAD and single ranges, as FORMAT.md 7 asks of any; can be told to misbehave."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvcdn.errors import UsageError
from kvcdn.store import BlobStore
from support.waiting import WAIT_SECONDS


@dataclass(frozen=True)
class Answer:
    """One answer in place of the right one."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Web:
    """A running server and what it was asked."""

    store: BlobStore
    port: int = 0
    ignores_ranges: bool = False
    token: str | None = None
    bend: Callable[[Answer], Answer] | None = None
    """Makes of a right answer what is sent."""
    answers: deque[Answer] = field(default_factory=deque)
    """Given first, one per request."""
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    """Method, path and headers of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running_web(store: BlobStore) -> Iterator[Web]:
    """A server over `store`, until the block ends."""
    web = Web(store)
    handler = type("Handler", (_Handler,), {"web": web})
    with _Server(("127.0.0.1", 0), handler) as server:
        web.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that leave are part of the tests
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    web: Web
    protocol_version = "HTTP/1.1"
    timeout = WAIT_SECONDS
    wbufsize = -1  # headers and body in one packet: two would wait for each other (Nagle and delayed acknowledgement)

    def do_GET(self) -> None:
        answer = self._choose()
        self._answer(answer if self.web.bend is None else self.web.bend(answer))

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: object) -> None:
        """Silent: `Web.requests` has it all."""

    def _choose(self) -> Answer:
        web = self.web
        web.requests.append((self.command, self.path, dict(self.headers)))
        if web.answers:
            return web.answers.popleft()
        if web.token is not None and self.headers.get("Authorization") != f"Bearer {web.token}":
            return Answer(401)
        try:
            info = web.store.stat(self.path.removeprefix("/"))
        except UsageError:
            info = None
        if info is None:
            return Answer(404)
        common = {"ETag": f'"{info.size}"', "Last-Modified": formatdate(info.modified, usegmt=True), "Accept-Ranges": "bytes"}
        data = web.store.read(info.key)
        asked = self.headers.get("Range")
        if asked is None or web.ignores_ranges or self.command == "HEAD":
            return Answer(200, common, data)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1 if last else info.size, info.size)
        if start >= info.size:
            return Answer(416, {"Content-Range": f"bytes */{info.size}"})
        return Answer(206, common | {"Content-Range": f"bytes {start}-{stop - 1}/{info.size}"}, data[start:stop])

    def _answer(self, answer: Answer) -> None:
        headers = {"Content-Length": str(len(answer.body))} | dict(answer.headers)
        self.send_response(answer.status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(answer.body)
        if headers["Content-Length"] != str(len(answer.body)):
            self.close_connection = True
