"""Access settings: what every service is told of who may ask it, and of TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings

from kvcdn.access.tokens import AUDIENCE


class AccessSettings(BaseSettings):
    """The part that the settings of services have in common."""

    token: SecretStr | None = Field(default=None, description="Bearer token of whoever may do everything.")
    token_file: Path | None = Field(default=None, description="File that holds the token, in place of `token`.")
    issuers_file: Path | None = Field(
        default=None,
        description="Whose tokens are taken, and links at an edge: a public key a line. `kvcdn token` makes tokens.",
    )
    audience: str = Field(default=AUDIENCE, min_length=1, max_length=128, description="The `aud` that tokens must name.")
    tls_cert: Path | None = Field(default=None, description="Certificate chain in PEM: speak HTTPS, and nothing else.")
    tls_key: Path | None = Field(default=None, description="The certificate's private key in PEM.")
    insecure_http: bool = Field(
        default=False,
        description="Listen in plain HTTP on more than loopback. Asks for tokens, which then travel unencrypted.",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self
