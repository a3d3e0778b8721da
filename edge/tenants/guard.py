"""The edge's guard: what its settings say of who may ask."""

from __future__ import annotations

import hmac
from typing import Self

from kvcdn.access import guard
from kvcdn.access.grant import Grant, Scope
from kvcdn.edge.fills.peers import require_encrypted
from kvcdn.edge.settings import ENV_PREFIX, EdgeSettings
from kvcdn.errors import UsageError

PEER = Grant("peer", frozenset({Scope.READ}))
"""Another edge of the site. Its readers are counted where they ask, and it is not."""


class Guard(guard.Guard):
    """Turns an Authorization header, or a link's query, into a grant, as the settings of an edge say."""

    peer_token: str | None = None
    """What peers show, this edge to them included."""

    @classmethod
    def of(cls, settings: EdgeSettings) -> Self:
        """The guard `settings` ask for. Raises UsageError where they would leave the edge open to the network."""
        made = cls.told(settings, ENV_PREFIX)
        for name, listen in (("listen", settings.address), ("admin_listen", settings.admin_address)):
            if listen is not None:
                made.require_safe(name, listen, tls=settings.tls_cert is not None, insecure_http=settings.insecure_http)
        made.peer_token = guard.read_token(None, settings.peer_token_file, ENV_PREFIX)
        if settings.peers and made.peer_token is None and not made.is_open:
            raise UsageError(
                "peers are named, this edge asks for tokens, and peers have none to show",
                hint="set peer_token_file to a file that is the same at all peers: openssl rand -hex 32",
            )
        if made.peer_token is not None and not settings.insecure_http:
            require_encrypted(settings.peers)
        return made

    def admit(self, authorization: str | None) -> Grant:
        """As every guard's; who shows the peers' token is one of them."""
        if self.peer_token is not None and authorization is not None:
            shown = f"Bearer {self.peer_token}".encode()
            if hmac.compare_digest(authorization.encode("utf-8", "replace"), shown):
                return PEER
        return super().admit(authorization)
