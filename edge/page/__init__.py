"""The status page: files that a browser shows. What they show they ask `/v1/status` for, so that they say nothing themselves.

A browser sends no token by itself, and a cookie would be sent for whoever asks it to. So the page is everybody's who reaches
the address of administration, its figures are not: its script asks for a token of the scope `stats` where it is refused, keeps
it in the tab, and sends it in a header that no other site can have sent. No file needs another host, or may reach one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from aiohttp import web
from blake3 import blake3

from kvcdn.edge.http.respond import Note, PlainResponse

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content Security Policy, level 3: nothing inline, nothing from elsewhere, in nobody's frame."""

_HEADERS = {
    # The files change with the version: a browser keeps them, and asks whether they are still those.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class PageFile:
    """One file, as it is sent."""

    content_type: str
    body: bytes
    etag: str

    def answer(self, request: web.BaseRequest, note: Note) -> PlainResponse:
        """The file, or 304 where the browser has it."""
        headers = {**_HEADERS, "Content-Type": self.content_type, "ETag": self.etag}
        known = request.headers.get("If-None-Match", "")
        if self.etag in known:
            return PlainResponse(note, 304, headers)
        return PlainResponse(note, 200, headers, self.body)


def _read(name: str, content_type: str) -> PageFile:
    body = (files(__name__) / name).read_bytes()
    return PageFile(content_type, body, f'"{blake3(body).hexdigest()[:32]}"')


PAGE = {
    "/": _read("index.html", "text/html; charset=utf-8"),
    "/page.css": _read("page.css", "text/css; charset=utf-8"),
    "/page.js": _read("page.js", "text/javascript; charset=utf-8"),
    "/chart.js": _read("chart.js", "text/javascript; charset=utf-8"),
    "/icon.svg": _read("icon.svg", "image/svg+xml"),
}
"""By path."""
