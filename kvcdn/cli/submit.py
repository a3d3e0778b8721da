"""`kvcdn publish --service`: hand documents to a prefill service, and wait for what becomes of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import typer
import urllib3

from kvcdn.cli.output import note, print_error, print_json, print_pairs
from kvcdn.errors import KvcdnError, NotFoundError, UnavailableError, UntrustedError, UsageError

POLL_SECONDS = 1.0

_TIMEOUT = urllib3.Timeout(connect=10, read=60)

_RETRIES = 8
"""Of a request that was refused for now, or got no answer: jobs have keys, so that none is submitted twice."""

_ERRORS: Mapping[int, type[KvcdnError]] = {
    400: UsageError,
    401: UntrustedError,
    403: UntrustedError,
    404: NotFoundError,
    413: UsageError,
}

MAX_ANSWER_BYTES = 16 << 20


class ServiceClient:
    """A prefill service at `url`, as a client sees it."""

    def __init__(self, url: str, token: str | None) -> None:
        """Raises UsageError for what is no http(s) URL."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(f"--service takes a URL such as http://127.0.0.1:8500, not {url[:80]!r}")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool = urllib3.PoolManager(timeout=_TIMEOUT, retries=False)

    def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The job that a request became. Raises a KvcdnError."""
        answer = self._ask("POST", "/v1/jobs", json.dumps(request).encode())
        jobs: list[dict[str, Any]] = answer["jobs"]
        return jobs[0]

    def watches(self) -> list[dict[str, Any]]:
        """What the service's watches see. Raises a KvcdnError."""
        found: list[dict[str, Any]] = self._ask("GET", "/v1/watches")["watches"]
        return found

    def add_watch(self, watch: Mapping[str, Any]) -> dict[str, Any]:
        """The watch as the service has taken it. Raises a KvcdnError."""
        return self._ask("POST", "/v1/watches", json.dumps(watch).encode())

    def remove_watch(self, name: str) -> None:
        """Ends a watch that was added. Raises a KvcdnError."""
        self._ask("DELETE", f"/v1/watches/{quote(name, safe='')}")

    def jobs(self, state: str | None, after: str, limit: int) -> dict[str, Any]:
        """A page of the jobs that the token may see: `jobs`, and what is `next`. Raises a KvcdnError."""
        asked = {"state": state, "after": after, "limit": limit}
        return self._ask("GET", "/v1/jobs?" + urlencode({word: value for word, value in asked.items() if value}))

    def get(self, name: str) -> dict[str, Any]:
        """The job `name` as it is now. Raises a KvcdnError."""
        return self._ask("GET", f"/v1/jobs/{quote(name, safe='')}")

    def cancel(self, name: str) -> dict[str, Any]:
        """The job, cancelled if it has not ended. Raises a KvcdnError."""
        return self._ask("DELETE", f"/v1/jobs/{quote(name, safe='')}")

    def retry(self, name: str) -> dict[str, Any]:
        """The dead job, queued again. Raises a KvcdnError."""
        return self._ask("POST", f"/v1/jobs/{quote(name, safe='')}/retry")

    def follow(self, name: str) -> Iterator[dict[str, Any]]:
        """The job, again and again, until it has ended."""
        while True:
            job = self.get(name)
            yield job
            if job["state"] in ("published", "dead", "cancelled"):
                return
            time.sleep(POLL_SECONDS)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {**self._headers, **({"Content-Type": "application/json"} if body is not None else {})}
        for attempt in range(_RETRIES):
            try:
                answer = self._pool.request(
                    method, self._url + path, body=body, headers=headers, redirect=False, preload_content=False
                )
                status, wait = answer.status, answer.headers.get("Retry-After", "")
                data = answer.read(MAX_ANSWER_BYTES)
                answer.release_conn()
            except urllib3.exceptions.HTTPError as error:
                status, wait, data = 0, "", type(error).__name__.encode()
            if status in (200, 201, 202):
                return self._value(data)
            if status not in (0, 429, 503):
                break
            if attempt + 1 < _RETRIES:
                time.sleep(min(int(wait) if wait.isdecimal() else 0.5 * 2**attempt, 30))
        if not status:
            raise UnavailableError(f"the service at {self._url} does not answer ({data.decode()})", hint="is it running?")
        told = self._value(data)
        kind = _ERRORS.get(status, UnavailableError)
        raise kind(f"the service at {self._url} says: {str(told.get('error'))[:500]}", hint=str(told.get("hint", ""))[:500])

    def _value(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UnavailableError(f"what answers at {self._url} is no prefill service")
        return value


def submit_all(
    service: ServiceClient,
    requests: Sequence[tuple[str, Mapping[str, Any]]],
    failures: Sequence[KvcdnError] = (),
    *,
    wait: bool,
    as_json: bool,
) -> None:
    """Submits named documents, and shows what became of each; `failures` are of those that could not be read.

    One that is refused stops no other. Exits with the code of the first failure, with 1 where only the service failed.
    """
    jobs, refused = [], list(failures)
    for name, request in requests:
        try:
            jobs.append((name, service.submit(request)))
        except KvcdnError as error:
            if len(requests) + len(failures) == 1:
                raise
            print_error(error, as_json=as_json)
            refused.append(error)
            if isinstance(error, UnavailableError | UntrustedError):
                break  # the rest would meet the same; what was accepted is told
    published = 0
    for name, job in jobs:
        last = job
        if wait:
            *_, last = service.follow(job["id"])
        published += last["state"] not in ("dead", "cancelled")
        if as_json:
            print_json({"document": name, **last})
        else:
            _show(name, last)
    total = len(requests) + len(failures)
    if published < total:
        note(f"kvcdn: {total - published} of {total} documents were not published")
        raise typer.Exit(refused[0].exit_code if refused else 1)


def _show(name: str, job: Mapping[str, Any]) -> None:
    rows = [("document", f"{name}: {job['state']}" + (f", {job['reason']}" if job["reason"] else "")), ("job", str(job["id"]))]
    if job["result"]:
        rows += [("address", str(job["result"]["address"])), ("tokens", f"{job['result']['tokens']:,}")]
    print_pairs(rows)
