"""Plain reads from S3: a signed GET without what botocore does around one, which takes more processor time than the request.

What is no plain answer (a refusal, a redirect, a broken connection) is nothing: botocore is to ask then, which retries, follows
and explains.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

IN_VAIN = 5
"""So often in a row refused what botocore then got: this server wants more than a plain request, and gets no more of them."""

_REFUSAL_BYTES = 4096
"""Of a refusal's body: enough for its code."""


@dataclass(frozen=True)
class Answer:
    """What a server said to a GET; a status of 200 or 206 has a body, any other was read to its end."""

    status: int
    headers: Mapping[str, str]
    stream: Any


class Signer(NamedTuple):
    """What signs requests, and of which region the bucket is taken to be."""

    credentials: Any
    region: str


class PlainReader:
    """Sends plain requests for one bucket's objects."""

    def __init__(self, session: Any, base: str, signer: Signer, headers: Mapping[str, str]) -> None:
        """`base` is the URL of the bucket, with a slash behind; `session` sends botocore's prepared requests.

        `headers` go with each of them.
        """
        self._session = session
        self._base = base
        self._signer = signer
        self._headers = headers
        self._vain = 0
        self._lock = threading.Lock()

    def get(self, name: str, headers: Mapping[str, str]) -> Answer | None:
        """200, 206, 404 for an object, 412, 416; None for everything else. Sends nothing once plain requests proved vain."""
        if self._vain >= IN_VAIN:
            return None
        from botocore.auth import S3SigV4Auth  # noqa: PLC0415 - only who uses S3 pays for loading it
        from botocore.awsrequest import AWSRequest  # noqa: PLC0415 - as above
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415 - as above

        request = AWSRequest("GET", self._base + name, headers={**self._headers, **headers}, stream_output=True)
        try:
            S3SigV4Auth(self._signer.credentials.get_frozen_credentials(), "s3", self._signer.region).add_auth(request)
            answered = self._session.send(request.prepare())
        except BotoCoreError:
            return None
        answer = Answer(answered.status_code, answered.headers, answered.raw)
        if answer.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            self.count(vain=False)
            return answer
        return answer if _is_plain(answer) else None

    def count(self, *, vain: bool) -> None:
        """Told how a plain request ended; `vain` where botocore then got what it had been refused."""
        with self._lock:
            self._vain = self._vain + 1 if vain else 0


def _is_plain(refusal: Answer) -> bool:
    """Whether a refusal needs no explanation. Reads its body, so that the connection can be used again."""
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - only who uses S3 pays for loading it

    try:
        body = refusal.stream.read(_REFUSAL_BYTES, decode_content=False)
    except (HTTPError, OSError):
        body = b""
    refusal.stream.close()
    if refusal.status == HTTPStatus.NOT_FOUND:  # a missing bucket is another matter
        return b"<Code>NoSuchKey</Code>" in body
    return refusal.status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
