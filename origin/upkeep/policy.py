"""S3 policies: what each role has to be allowed, and no more."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from kvcdn.errors import UsageError
from kvcdn.origin.upkeep.doctor import Role

_READ = ("s3:GetObject",)
_WRITE = ("s3:PutObject", "s3:AbortMultipartUpload")
_DELETE = ("s3:DeleteObject",)

ABORT_UPLOADS_DAYS = 1
"""After which the parts of an upload that was never completed are removed: they cost money and nobody sees them."""


def policy(role: Role, origin: str) -> dict[str, Any]:
    """An IAM policy for `role` at `s3://bucket/prefix`. Raises UsageError for another kind of origin."""
    bucket, objects = _resources(origin)
    match role:
        case Role.EDGE:
            statements = [_allow(_READ, f"{objects}/v1/*")]
        case Role.PUBLISHER:
            # Its own leases are all that a publisher has to delete.
            statements = [_allow(_READ + _WRITE, f"{objects}/v1/*"), _allow(_DELETE, f"{objects}/v1/*/leases/*")]
        case Role.OPERATOR:
            statements = [_allow(_READ + _WRITE + _DELETE, f"{objects}/v1/*"), _deny(_DELETE, f"{objects}/v1/journal/*")]
    # Without a condition on the prefix, which a HEAD request does not carry: a missing object would be answered with 403.
    return {"Version": "2012-10-17", "Statement": [*statements, _allow(("s3:ListBucket",), bucket)]}


def lifecycle(origin: str) -> dict[str, Any]:
    """The one lifecycle rule that a bucket needs. Raises UsageError as `policy` does."""
    _resources(origin)
    prefix = urlsplit(origin).path.strip("/")
    rule = {
        "ID": "kvcdn-abort-uploads",
        "Status": "Enabled",
        "Filter": {"Prefix": f"{prefix}/v1/".lstrip("/")},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": ABORT_UPLOADS_DAYS},
    }
    return {"Rules": [rule]}


def _allow(actions: tuple[str, ...], resource: str) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": list(actions) if len(actions) > 1 else actions[0], "Resource": resource}


def _deny(actions: tuple[str, ...], resource: str) -> dict[str, Any]:
    """What no other statement can allow."""
    return {**_allow(actions, resource), "Effect": "Deny"}


def _resources(origin: str) -> tuple[str, str]:
    """The resource names of the bucket, and of where its objects begin."""
    parts = urlsplit(origin)
    if parts.scheme.lower() != "s3" or not parts.netloc:
        raise UsageError(f"policies are for S3, not for {origin[:200]!r}", hint="name an origin as s3://bucket/prefix")
    bucket = f"arn:aws:s3:::{parts.netloc}"
    return bucket, f"{bucket}/{parts.path.strip('/')}".rstrip("/")
