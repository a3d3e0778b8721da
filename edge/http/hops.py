"""Hops: the edges that a request has come by (RFC 9110 section 7.6.3), so that tiers that form a circle are found out.

Each edge has a name of its own, new at every start, and adds it to what it asks on behalf of a request. Of the field that a
request brings nothing else is passed on, so that strangers cannot send anything through an edge.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from kvcdn import trail
from kvcdn.edge.http.outcome import Reason, Refusal

MAX_HOPS = 8
"""Edges before this one: more tiers than anybody needs, and a bound where names were lost on the way."""

_HOP = re.compile(r"1\.1 (kvcdn-[0-9a-f]{16})(?![0-9a-z])")


def from_edge(via: Sequence[str]) -> bool:
    """Whether a request with such Via fields says that an edge asks."""
    return any(_HOP.search(field) for field in via)


class Hops:
    """This edge among others."""

    def __init__(self) -> None:
        self.name = f"kvcdn-{secrets.token_hex(8)}"

    def begin(self) -> None:
        """What the caller's task and those that it begins ask for, asks this edge."""
        trail.passing(f"1.1 {self.name}")

    def pass_on(self, via: Sequence[str]) -> Refusal | None:
        """The caller's task runs for a request with such Via fields; why not, where it has come by here, or by too many."""
        names = _HOP.findall(", ".join(via))
        if self.name in names:
            return Refusal(Reason.LOOP, f"the request came by this edge before, as {self.name}: its origins lead back to it")
        if len(names) > MAX_HOPS:
            return Refusal(
                Reason.LOOP, f"the request came by {len(names)} edges, more than {MAX_HOPS}: do origins form a circle?"
            )
        trail.passing(", ".join(f"1.1 {name}" for name in (*names, self.name)))
        return None
