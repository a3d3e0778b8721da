"""Ray's environment: what it is told by variables before it is imported, and where it may be used at all.

Whoever reaches the ports of a Ray cluster runs code on it. The Ray that a service starts for itself therefore listens on
loopback, for processes that have its token, which is new each time; a cluster elsewhere must ask for a token, and use TLS.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Mapping

from kvcdn.access.listening import ListenAddress
from kvcdn.errors import UsageError
from kvcdn.origin.service.service_settings import ENV_PREFIX, ServiceSettings

LOOPBACK = "127.0.0.1"

_STAY_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Without this, Ray on Linux takes 127.0.0.1 for a mistake, and puts the machine's own address in its place."""


def require_ray(settings: ServiceSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Raises UsageError where these settings need a Ray that is not installed, or one that anybody could give orders."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError('executor = "ray" needs Ray, which is not installed', hint='pip install "kvcdn[ray]"')
    if settings.ray_address is None or settings.insecure_ray:
        return
    local = ListenAddress.parse(settings.ray_address).is_loopback and _STAY_LOCAL.items() <= environment.items()
    guarded = environment.get("RAY_AUTH_MODE") == "token" and environment.get("RAY_USE_TLS") == "1"
    if not local and not guarded:
        raise UsageError(
            f"the Ray cluster at {settings.ray_address} is reached by others, and signing keys and documents go there",
            hint="RAY_AUTH_MODE=token and RAY_USE_TLS=1 for all of it, or insecure_ray = true on a network of your own",
        )


def ray_environment(settings: ServiceSettings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the process that uses Ray: this one's less the service's settings, some of which are secret.

    With what keeps a Ray of the service's own to itself.
    """
    told = {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX)}
    told["RAY_USAGE_STATS_ENABLED"] = "0"
    if settings.ray_address is None:
        told |= {**_STAY_LOCAL, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return told
