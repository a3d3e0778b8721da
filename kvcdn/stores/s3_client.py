"""The S3 client: how boto3 is set up for AWS and for other servers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvcdn.errors import UsageError
from kvcdn.stores.http import is_loopback
from kvcdn.stores.s3_plain import PlainReader, Signer

CONNECT_SECONDS = 5
STALL_SECONDS = 30
"""Longest silence while an answer is awaited or read."""

TRIES = 3
"""Of each request, with pauses of up to 1 and 2 seconds: a restarted server is waited for, a dead one is told soon."""

CONNECTIONS = 32
"""Idle connections kept: as many as threads that fetch at once."""

DEFAULT_REGION = "us-east-1"
"""For servers that have no regions; AWS's tells us where a bucket really is."""

URL_HINT = "write s3://bucket/prefix, for servers other than AWS s3://bucket/prefix?endpoint=http://host:port"
CREDENTIALS_HINT = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run: aws configure"
BUCKET_HINT = "check the bucket's name and the endpoint, or create it"

REQUESTER = "requester"

_PAYER = "x-amz-request-payer"
"""Who sends it pays for the request and its traffic: buckets with requester pays answer 403 to all others."""

_ANY_KEY = "any-key"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""Bucket names as AWS defines them; other servers allow no less."""


def checked_bucket(bucket: str) -> str:
    """`bucket` itself. Raises UsageError for what cannot be one."""
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{bucket[:80]!r} is not a bucket: 3 to 63 small letters, digits, dots, dashes", hint=URL_HINT)
    return bucket


def is_aws(endpoint: str) -> bool:
    """Whether `endpoint` is AWS itself: it takes bucket names as host names and lists in key order."""
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


class Connected(NamedTuple):
    """What a store asks with."""

    client: Any
    login: str
    """In words, which credentials the client uses."""
    session: Any
    """botocore's, from which the client is."""
    headers: Mapping[str, str]
    """What goes with every request besides."""


def connect(endpoint: str | None, region: str | None, profile: str | None, *, pays: bool = False) -> Connected:
    """A client and what belongs to it, which `pays` for its requests. Sends no request to the store.

    Raises UsageError for a malformed endpoint and for missing credentials, and what botocore raises for its own files.
    """
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint is not None:
        _check_endpoint(endpoint)
    session, core = _session(profile, region)
    credentials = session.get_credentials()
    if credentials is None:
        raise UsageError("there are no credentials for S3", hint=CREDENTIALS_HINT)
    client = _client(session, endpoint, path_style=endpoint is not None and not is_aws(endpoint))
    if endpoint is None and not is_aws(client.meta.endpoint_url):  # AWS's configuration file named another server
        client = _client(session, client.meta.endpoint_url, path_style=True)
    headers = {_PAYER: REQUESTER} if pays else {}
    client.meta.events.register("before-call.s3", lambda params, **_: params["headers"].update(headers))
    return Connected(client, f"access key {credentials.access_key} (from: {credentials.method})", core, headers)


def plain_reader(connected: Connected, bucket: str) -> PlainReader:
    """What reads from `bucket` with as little as possible around a request, where and as whom `connected` would."""
    from botocore.httpsession import URLLib3Session  # noqa: PLC0415 - only who uses S3 pays for loading it
    from botocore.utils import get_environ_proxies  # noqa: PLC0415 - as above

    client = connected.client
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": _ANY_KEY})  # sends nothing
    base = url.partition("?")[0].removesuffix(_ANY_KEY)
    session = URLLib3Session(
        proxies={} if is_loopback(urlsplit(base).hostname or "") else get_environ_proxies(base),
        verify=connected.session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE") or True,
        timeout=(CONNECT_SECONDS, STALL_SECONDS),
        max_pool_connections=CONNECTIONS,
    )
    return PlainReader(session, base, Signer(connected.session.get_credentials(), client.meta.region_name), connected.headers)


def _session(profile: str | None, region: str | None) -> tuple[Any, Any]:
    """boto3's session, and botocore's within it."""
    from boto3.session import Session  # noqa: PLC0415 - it takes a third of a second to load: only who uses S3 pays
    from botocore.session import Session as CoreSession  # noqa: PLC0415 - as above

    core = CoreSession()
    core.register_component("data_loader", _loader())
    return Session(profile_name=profile, region_name=region, botocore_session=core), core


@cache
def _loader() -> Any:
    """What botocore knows of services, read once per process: a fifth of a second per client otherwise."""
    from botocore.loaders import create_loader  # noqa: PLC0415 - as above

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _client(session: Any, endpoint: str | None, *, path_style: bool) -> Any:
    from botocore.config import Config  # noqa: PLC0415 - only who uses S3 pays for loading it

    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if path_style else "virtual"},
        retries={"mode": "standard", "total_max_attempts": TRIES},
        connect_timeout=CONNECT_SECONDS,
        read_timeout=STALL_SECONDS,
        max_pool_connections=CONNECTIONS,
        # We send our own checksums: botocore would send them as a trailer, which not every server reads.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        proxies={} if endpoint and is_loopback(urlsplit(endpoint).hostname or "") else None,
    )
    region = session.region_name or DEFAULT_REGION
    return session.client("s3", endpoint_url=endpoint, region_name=region, config=config)


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.username is not None or parts.query or parts.fragment:
        raise UsageError("the endpoint of an s3:// store is not a plain http(s) URL", hint="write http://host:port")
