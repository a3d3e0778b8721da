"""Orders to an edge: what its administration is asked for over HTTP, and what its answers mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvcdn.errors import CorruptError, KvcdnError, NotFoundError, UnavailableError, UntrustedError, UsageError

CONNECT_SECONDS = 5.0

ANSWER_SECONDS = 120.0
"""How long an edge may take: it deletes, or reads, before it answers."""

ANSWER_BYTES = 64 * 1024
"""Beyond this it is no answer of an edge's."""

LIST_BYTES = 4 << 20
"""The same of a list: ten thousand lines."""

AdminEdge = Annotated[
    str, typer.Option("--edge", envvar="KVCDN_EDGE", help="URL of the edge, where its administration is (admin_listen).")
]


def order(edge: str, path: str, token: str | None, value: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object that the edge at the URL `edge` answers to `value`.

    Raises UsageError where it refuses the request, UntrustedError the token, NotFoundError, UnavailableError.
    """
    return _ask(edge, "POST", path, token, json.dumps(value).encode("ascii"), ANSWER_BYTES)


def look(edge: str, path: str, token: str | None) -> dict[str, Any]:
    """The JSON object that is to be seen there. Raises as `order`."""
    return _ask(edge, "GET", path, token, None, LIST_BYTES)


def _ask(edge: str, method: str, path: str, token: str | None, body: bytes | None, longest: int) -> dict[str, Any]:
    if not edge.startswith(("http://", "https://")) or "," in edge:
        raise UsageError(f"--edge takes one URL such as http://127.0.0.1:8400, not {edge[:200]!r}")
    import urllib3  # noqa: PLC0415 - see kvcdn.cli

    headers = {"Content-Type": "application/json"} if body is not None else {}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=ANSWER_SECONDS)
    try:
        with urllib3.PoolManager(timeout=timeout, retries=False) as pool:
            reply = pool.request(
                method, edge.rstrip("/") + path, body=body, headers=headers, preload_content=False, redirect=False
            )
            data = reply.read(longest)
            reply.close()
    except urllib3.exceptions.LocationParseError:
        raise UsageError(f"--edge: {edge[:200]!r} is not a URL") from None
    except urllib3.exceptions.HTTPError as error:
        raise UnavailableError(f"{edge} cannot be reached: {type(error).__name__}", hint="is the edge running there?") from None
    if reply.status not in (200, 202):
        raise _refusal(reply.status, f"{edge} answers {reply.status}: {data.decode('utf-8', 'replace').strip()[:300]}")
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise CorruptError(f"{edge} does not answer as an edge does", hint="does --edge name its address of administration?")
    return answer


def _refusal(status: int, message: str) -> KvcdnError:
    match status:
        case 401 | 403:
            return UntrustedError(
                message, hint="give a token with the scope (--token or KVCDN_TOKEN), at the address of administration"
            )
        case 404 | 410:
            return NotFoundError(message, hint="does --edge name the edge's address of administration?")
        case _ if status < 500:  # noqa: PLR2004 - HTTP's own number
            return UsageError(message)
        case _:
            return UnavailableError(message, hint="try again later, or see the edge's log")


def count(answer: Mapping[str, Any], name: str, edge: str) -> int:
    """A number of an edge's answer. Raises CorruptError."""
    value = answer.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CorruptError(f"{edge} does not answer as an edge does: {name} is not a number")
    return value
