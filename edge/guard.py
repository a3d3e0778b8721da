"""The edge's guard: what its settings say of who may ask."""

from __future__ import annotations

from typing import Self

from kvcdn.access import guard
from kvcdn.edge.settings import ENV_PREFIX, EdgeSettings


class Guard(guard.Guard):
    """Turns an Authorization header, or a link's query, into a grant, as the settings of an edge say."""

    @classmethod
    def of(cls, settings: EdgeSettings) -> Self:
        """The guard `settings` ask for. Raises UsageError where they would leave the edge open to the network."""
        token = settings.token.get_secret_value() if settings.token else None
        made = cls(
            guard.read_token(token, settings.token_file, ENV_PREFIX),
            guard.read_issuers(settings.issuers_file),
            settings.audience,
        )
        for name, listen in (("listen", settings.address), ("admin_listen", settings.admin_address)):
            if listen is not None:
                made.require_safe(name, listen, tls=settings.tls_cert is not None, insecure_http=settings.insecure_http)
        return made
