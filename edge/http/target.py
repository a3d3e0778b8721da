"""The target: which object a request's path names, read strictly (FORMAT.md 2.6)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvcdn.digest import Digest, ModelTag
from kvcdn.keys import block_key, manifest_key

_PATH = re.compile(
    r"/v1/(?P<tag>[0-9a-f]{32})/(?:blocks/(?P<aa>[0-9a-f]{2})/(?P<block>(?P=aa)[0-9a-f]{62})|manifests/(?P<manifest>[0-9a-f]{64}))"
)

_SHOWN_DIGITS = 12
"""Enough of an address to find it again in a log, not enough to fetch it."""


class Kind(StrEnum):
    """The kinds of objects an edge caches."""

    BLOCK = "block"
    MANIFEST = "manifest"


@dataclass(frozen=True)
class ObjectName:
    """What an edge is asked for: kind, model and address."""

    kind: Kind
    tag: ModelTag
    address: Digest

    @classmethod
    def from_path(cls, path: str) -> ObjectName | None:
        """The object that a URL path, undecoded, names in its one text form; None for every other path."""
        match = _PATH.fullmatch(path)
        if match is None:
            return None
        kind = Kind.BLOCK if match["block"] else Kind.MANIFEST
        address = match["block"] or match["manifest"]
        return cls(kind, ModelTag(bytes.fromhex(match["tag"])), Digest(bytes.fromhex(address)))

    @cached_property
    def key(self) -> str:
        """The object key at the origin."""
        return (block_key if self.kind is Kind.BLOCK else manifest_key)(self.tag, self.address)

    @property
    def short(self) -> str:
        """The form for logs."""
        return short_of(self.key)

    def __str__(self) -> str:
        return f"{self.kind} {self.address}"


def short_of(key: str) -> str:
    """The form for logs of the object under `key`."""
    kind = Kind.BLOCK if key[36] == "b" else Kind.MANIFEST
    return f"{kind} {key[-64:][:_SHOWN_DIGITS]}"
