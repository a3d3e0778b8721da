"""`kvcdn token`: permissions for tenants of an edge or a prefill service."""

from __future__ import annotations

import re
import time
from typing import Annotated
from urllib.parse import urlsplit

import typer

from kvcdn.access.grant import Grant, Scope
from kvcdn.access.links import sign_link
from kvcdn.access.tokens import AUDIENCE, issue_token
from kvcdn.cli.options import AsJson
from kvcdn.cli.output import note, print_json, print_text
from kvcdn.cli.passphrase import passphrase_for
from kvcdn.errors import UsageError
from kvcdn.keyring import load_signing_key, signing_key_path

_DURATION = re.compile(r"([0-9]{1,6})([smhd])")

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


def token(
    tenant: Annotated[str, typer.Argument(help="On whose account: a name of your choice.")],
    scope: Annotated[list[Scope] | None, typer.Option(help="What may be done; several times for more. Default: read.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only this model: a tag or name, * and ? allowed.")] = None,
    namespace: Annotated[list[str] | None, typer.Option("--namespace", "-n", help="Only this namespace, where named.")] = None,
    valid: Annotated[
        str | None, typer.Option("--for", help="How long it counts: 30d (a token, unless told), 1d (a link), 12h, 15m, 60s.")
    ] = None,
    bytes_per_day: Annotated[int | None, typer.Option(min=1, help="Most body bytes in a day.")] = None,
    audience: Annotated[str, typer.Option(help="The service's audience.")] = AUDIENCE,
    link: Annotated[str | None, typer.Option(help="Make a link to this object's URL instead.")] = None,
    key: Annotated[str, typer.Option(help="Name of the issuer's signing key.")] = "issuer",
    *,
    as_json: AsJson = False,
) -> None:
    """Make a token, or a link to one object. The service's issuers_file has to hold the key's public half.

    Make the key with: kvcdn keygen --name issuer. What is made is not recorded anywhere, and counts until it ends.
    """
    path = signing_key_path(key)
    signing, seconds, now = (
        load_signing_key(path, passphrase_for(path)),
        _seconds(valid or ("1d" if link else "30d")),
        time.time(),
    )
    if link is not None:
        if scope or model or namespace or bytes_per_day:
            raise UsageError("a link permits to read one object, and nothing else", hint="leave out the limits, or --link")
        made = _link(link, sign_link(signing, urlsplit(link).path, tenant=tenant, seconds=seconds, now=now))
    else:
        grant = Grant(
            tenant, frozenset(scope or (Scope.READ,)), tuple(model or ("*",)), tuple(namespace or ("*",)), bytes_per_day
        )
        made = issue_token(signing, grant, seconds=seconds, now=now, audience=audience)
    if as_json:
        print_json({"token" if link is None else "link": made, "tenant": tenant, "expires": int(now + seconds)})
    else:
        print_text(made)
        note(f"issued by {signing.public.text}")


def _link(url: str, query: str) -> str:
    if urlsplit(url).query or urlsplit(url).fragment:
        raise UsageError(f"{url[:200]} has a query already", hint="give the URL of an object at an edge")
    return f"{url}?{query}"


def _seconds(text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None or not int(match[1]):
        raise UsageError(f"{text[:40]!r} is not a duration", hint="write 30d, 12h, 15m or 60s")
    return int(match[1]) * _SECONDS[match[2]]
