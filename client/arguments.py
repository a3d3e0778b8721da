"""Arguments of the SDK that have no form of their own: what each may be, and what is told to somebody who gives something else.

Most of those who use the SDK run no type checker. A wrong type would fail somewhere within, or, worse, mean something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, cast

from kvcdn.client.planning.plan import Prices
from kvcdn.client.sources.source import Source
from kvcdn.client.sources.sources import open_source
from kvcdn.client.usage import Usage
from kvcdn.errors import UsageError
from kvcdn.keys import Namespace
from kvcdn.model.checkpoint import Checkpoint
from kvcdn.signing import TrustList
from kvcdn.stores.local import LocalStore

_NUMBER = (int, float, NoneType)
_NAME = (str, NoneType)
_WHERE = (str, Path, NoneType)

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "checkpoint": ((*_WHERE, Checkpoint), "the folder, hub id or alias that the model was loaded from"),
    "adapters": ((Mapping, NoneType), "a folder for each adapter by its name: {'support': 'adapters/support'}"),
    "trust": ((TrustList, NoneType), "TrustList.of(PublicKey.from_text('ed25519:...')), or nothing for your own list"),
    "namespace": ((*_NAME, Namespace), "the name of a namespace whose secret you have"),
    "token": (_NAME, "the token as text"),
    "ca_file": (_WHERE, "the path of a file of certificates"),
    "audit": ((int, float), "a probability, 0 to 1"),
    "local_store": ((LocalStore, *_NAME), "LocalStore(folder), 'configured', or None for no store"),
    "precision": ((str, Sequence), "one precision, or a list of them: ('int8', 'native')"),
    "max_kl": (_NUMBER, "a number of nats, such as 0.003"),
    "progressive": ((bool,), "True or False"),
    "mode": ((str,), "auto, fetch, compute or both"),
    "deadline": (_NUMBER, "seconds from the question to the first token, as a number"),
    "prefer": ((str,), "fastest or cheapest"),
    "prices": ((Prices, NoneType), "Prices(usd_per_gpu_hour=..., usd_per_gb=...)"),
    "usage": ((*_WHERE, Usage), "the path of a ledger, or None to count nothing"),
    "name": ((str, Path), "a checkpoint folder, hub id or alias"),
    "device": ((str,), "the name of a device: cpu, cuda, cuda:1"),
}
"""By name: what an argument may be, and what to give."""


def check_arguments(**arguments: Any) -> None:
    """Raises UsageError for the first of `arguments` that is of another type, or no number where one is wanted."""
    for name, value in arguments.items():
        kinds, give = _KINDS[name]
        # A truth is a number, and text and bytes are sequences, to Python alone.
        misread = (isinstance(value, bool) and bool not in kinds) or isinstance(value, bytes) or value != value  # noqa: PLR0124 - not a number
        if misread or not isinstance(value, kinds):
            raise UsageError(f"{name} is {_shown(value)}", hint=f"give {give}")
    if not 0 <= arguments.get("audit", 0) <= 1:
        raise UsageError(f"audit is a probability, 0 to 1, not {arguments['audit']}")
    if arguments.get("local_store", "configured") not in ("configured", None) and isinstance(arguments["local_store"], str):
        raise UsageError(f"local_store is {_shown(arguments['local_store'])}", hint=f"give {_KINDS['local_store'][1]}")


def check_wishes(options: Mapping[str, Any]) -> None:
    """As `check_arguments`, of those among a prompt's `options` that are the client's."""
    check_arguments(**{name: options[name] for name in ("mode", "deadline", "prefer", "prices") if name in options})


def require_text(value: Any, what: str) -> None:
    """Raises UsageError for what would be put into a prompt as something else than it says: None, bytes, a list."""
    if not isinstance(value, str):
        raise UsageError(f"{what} is {_shown(value)}, and no text", hint="give a str")


def require_list(value: Any, what: str, give: str) -> None:
    """Raises UsageError for what is no list: text and bytes are lists of their characters to Python alone."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise UsageError(f"{what} is {_shown(value)}, and no list", hint=give)


def require_source(source: Any) -> None:
    """Raises UsageError for what neither is nor names a source."""
    named = [source] if isinstance(source, str | Path) else source
    if isinstance(named, Sequence) and not isinstance(named, bytes):
        others = [one for one in named if not isinstance(one, str | Path)]
        if named and not others:
            return
        source = others[0] if others else source
    elif hasattr(named, "session") and hasattr(named, "match"):
        return
    raise UsageError(
        f"the source is {_shown(source)}", hint="give an edge (http://...), an origin (a folder, s3://...), or a list of both"
    )


def opened_source(source: Any, token: str | None, ca_file: str | Path | None) -> Source:
    """`source` itself, or the one that it names; see `open_source`. Raises UsageError."""
    require_source(source)
    if not isinstance(source, str | Path | Sequence):
        return cast("Source", source)
    named = str(source) if isinstance(source, str | Path) else [str(one) for one in source]
    return open_source(named, token=token, ca_file=None if ca_file is None else str(ca_file))


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({str(value)[:40]!r})"
