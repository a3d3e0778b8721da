"""Connections: the framework's, mended where it leaves a client without an answer."""

from __future__ import annotations

from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo

_HEAD_END = b"\r\n\r\n"


class Connection(RequestHandler):
    """One connection, from the first request that the framework is to answer."""

    broken: StreamReader | None = None
    """The body behind which nothing can be read, because it is not framed as HTTP demands."""

    def data_received(self, data: bytes) -> None:
        """Takes what a client sent, head by head: the parser forgets what it is given together with an `Upgrade` to ignore."""
        end = data.find(_HEAD_END) + len(_HEAD_END)
        while len(_HEAD_END) <= end < len(data) and len(self._messages) < self._max_msg_queue_size:
            self._take(data[:end])
            data = data[end:]
            end = data.find(_HEAD_END) + len(_HEAD_END)
        self._take(data)

    def _take(self, data: bytes) -> None:
        super().data_received(data)
        if not self._messages or not isinstance(self._messages[-1][0], _ErrInfo):
            return
        # The error waits for its turn, behind the request whose body is awaited: that one would wait for its end in vain.
        request = self._current_request
        body = self._messages[-2][1] if len(self._messages) > 1 else None if request is None else request.content
        if body is not None and not body.is_eof():
            self.broken = body
            body.feed_eof()
