"""S3 errors: what a server's refusal means, and what to tell people about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import Any

from kvcdn.errors import KvcdnError, UnavailableError, UsageError
from kvcdn.stores.s3_client import BUCKET_HINT, CREDENTIALS_HINT

CLOCK_HINT = (
    "set this machine's clock (see: timedatectl), which S3 lets be 15 minutes off;"
    " where it is right, the link is so slow that one request took longer"
)

_HINTS = {
    "InvalidAccessKeyId": "this server does not know that access key: check which server and which key are meant",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: check AWS_SECRET_ACCESS_KEY or the profile",
    "ExpiredToken": "these credentials have expired: log in again",
    "InvalidToken": "the session token is not valid: log in again",
    "RequestTimeTooSkewed": CLOCK_HINT,
    "RequestExpired": CLOCK_HINT,
}
_DENIED_HINT = (
    "let that identity read, write and list there; AWS denies missing objects too where it may not list the bucket,"
    " and everything where readers pay and the URL has no ?request_payer=requester"
)
_REGION_HINT = "name the bucket's region: s3://bucket/prefix?region=..."
_CONDITION_HINT = "this server lacks conditional writes (If-None-Match), which a store needs: use a newer version"
_BETWEEN_HINT = "check the endpoint, and what is between: a proxy, or a network that wants a login"
_LATER_HINT = "try again later, or see that server's log"


class Refusal(Enum):
    """Refusals after which a caller goes on in its own way."""

    MISSING = "missing"
    EXISTS = "exists"
    CONFLICT = "conflict"
    DAMAGED = "damaged"
    """What arrived is not what was sent: it may arrive the next time."""
    RANGE = "range"
    OTHER = "other"


_REFUSALS = {404: Refusal.MISSING, 409: Refusal.CONFLICT, 412: Refusal.EXISTS, 416: Refusal.RANGE}
_DAMAGED = ("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch")


def refusal(error: Any) -> Refusal:
    """What a botocore ClientError says. A missing bucket is MISSING only to a HEAD, which has no body that could tell."""
    code = _code(error)
    if code in _DAMAGED:
        return Refusal.DAMAGED
    return Refusal.OTHER if code == "NoSuchBucket" else _REFUSALS.get(_status(error), Refusal.OTHER)


def was_retried(error: Any) -> bool:
    """Whether botocore had sent the request before; the earlier one may have worked, its reply lost."""
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)) > 0


def required(url: str, answer: Any, *names: str) -> list[Any]:
    """These fields of an answer. Raises UnavailableError where one is missing: no S3 server has said that.

    A proxy, or a network that wants a login, says 200 to everything: a write that never was, or an origin without documents.
    """
    found = [answer.get(name) for name in names]
    if None in found:
        raise UnavailableError(
            f"{url}: what answers is no S3 server: its answer has no {names[found.index(None)]}", hint=_BETWEEN_HINT
        )
    return found


def is_silent(error: Any) -> bool:
    """Whether a HEAD was refused, and nobody knows why: expired credentials, a wrong clock, a request that took too long."""
    return _status(error) in (400, 403) and _code(error) in ("400", "403")


@contextlib.contextmanager
def translated(url: str, action: str, login: str = "") -> Iterator[None]:
    """Turns what botocore raises into an error that names the store, the action and the next step."""
    from botocore import exceptions  # noqa: PLC0415 - only who uses S3 pays for loading it

    where = f"{url}: {action}" if action else url
    try:
        yield
    except exceptions.ClientError as error:
        raise _explain(error, where, login) from error
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        raise UsageError(f"{where}: there are no credentials", hint=CREDENTIALS_HINT) from error
    except (exceptions.ProfileNotFound, exceptions.ParamValidationError, exceptions.InvalidRegionError) as error:
        raise UsageError(f"{where}: {_line(error)}") from error
    except exceptions.SSLError as error:
        raise UnavailableError(f"{where}: no trusted TLS connection", hint="check its certificate and the clock") from error
    except exceptions.ProxyConnectionError as error:
        raise UnavailableError(
            f"{where}: the proxy cannot be reached", hint="see the variables HTTPS_PROXY, HTTP_PROXY, NO_PROXY"
        ) from error
    except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
        raise UnavailableError(
            f"{where}: the server cannot be reached ({type(error).__name__})",
            hint="check that it runs, and the endpoint's host and port",
        ) from error
    except (exceptions.BotoCoreError, OSError) as error:
        raise UnavailableError(f"{where}: {_line(error)}") from error


def _explain(error: Any, where: str, login: str) -> KvcdnError:
    status, code = _status(error), _code(error)
    what = f"{where}: the server answered {status} {code}"
    if code == "NoSuchBucket":
        return UnavailableError(f"{where}: there is no such bucket", hint=BUCKET_HINT)
    if code in _HINTS:
        return UnavailableError(f"{what} to {login}", hint=_HINTS[code])
    if status in (401, 403):
        return UnavailableError(f"{what} to {login}", hint=_DENIED_HINT)
    if status == 301 or code in ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException"):  # noqa: PLR2004 - HTTP
        return UnavailableError(what, hint=_REGION_HINT)
    if status == 501 or code == "NotImplemented":  # noqa: PLR2004 - HTTP
        return UnavailableError(what, hint=_CONDITION_HINT)
    return UnavailableError(what, hint=_LATER_HINT)


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))[:80]


def _line(error: BaseException) -> str:
    """The first line of an error, cut: some of botocore's span many."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
