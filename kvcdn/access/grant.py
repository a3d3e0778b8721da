"""Grants: what a tenant may do."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kvcdn.digest import ModelTag
from kvcdn.errors import UsageError

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

_PATTERN = re.compile(r"[A-Za-z0-9._/*?-]{1,128}")

MAX_PATTERNS = 64
"""Patterns in one grant: each is compared with each request's model."""


class Scope(enum.StrEnum):
    """What may be done. The words of a token's `scope` claim."""

    READ = "read"
    """Objects and matches."""
    WARM = "warm"
    """Have an edge fetch objects ahead of their readers, and pin them."""
    PURGE = "purge"
    """Have an edge drop objects."""
    STATS = "stats"
    """Metrics and the status of a service."""
    PUBLISH = "publish"
    """Hand documents to the prefill service."""
    ADMIN = "admin"
    """See and cancel the jobs of all tenants; revoke."""


@dataclass(frozen=True)
class Grant:
    """What a request may do, and on whose account."""

    tenant: str
    scopes: frozenset[Scope]
    models: tuple[str, ...] = ("*",)
    """Shell patterns of model tags, or of the names that a service knows models by."""
    namespaces: tuple[str, ...] = ("*",)
    """Shell patterns of namespace names; of use where a name is told. An object's address does not tell it."""
    bytes_per_day: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for a tenant or a pattern that is not a plain word."""
        if not _TENANT.fullmatch(self.tenant):
            raise UsageError(f"{self.tenant[:80]!r} is not a tenant: up to 64 letters, digits, dots, dashes, underscores and @")
        for pattern in (*self.models, *self.namespaces):
            if not _PATTERN.fullmatch(pattern):
                raise UsageError(f"{pattern[:80]!r} is not a pattern of models or namespaces")
        if max(len(self.models), len(self.namespaces)) > MAX_PATTERNS:
            raise UsageError(f"a grant has at most {MAX_PATTERNS} patterns of models and of namespaces")
        if self.bytes_per_day is not None and self.bytes_per_day < 1:
            raise UsageError("a grant of no bytes a day is none")

    def covers_model(self, tag: ModelTag, *names: str) -> bool:
        """Whether the model `tag`, also known by `names`, is one of the grant's."""
        return _matches(self.models, str(tag), *names)

    def covers_namespace(self, name: str) -> bool:
        """Whether the namespace `name` is one of the grant's; the public one has the name `public`."""
        return _matches(self.namespaces, name)


def _matches(patterns: tuple[str, ...], *names: str) -> bool:
    return patterns == ("*",) or any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


EVERYTHING = frozenset(Scope)
