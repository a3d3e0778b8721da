"""Wishes that `kvcdn publish` cannot fulfil: options that would be ignored, and what a published document does not take on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcdn.cli.inspect import day
from kvcdn.errors import UsageError

if TYPE_CHECKING:
    from kvcdn.origin.publishing.result import PublishResult
    from kvcdn.origin.publishing.settings import PublisherSettings
    from kvcdn.store import BlobStore

_HERE = frozenset(("adapter", "origin", "endpoint", "config", "key", "trust", "device", "usage", "dry_run"))
"""Parameters of this machine's own publishing, of which a service knows nothing."""

_AT_A_SERVICE = frozenset(("priority", "window", "wait"))
"""Parameters that only a service knows."""


def refuse_ignored(given: set[str], *, service: bool) -> None:
    """Raises UsageError for a given parameter that would be ignored, with a service or without one."""
    for name in sorted(given & (_HERE if service else _AT_A_SERVICE)):
        option = f"--{'no-wait' if name == 'wait' else name.replace('_', '-')}"
        if service:
            raise UsageError(
                f"{option} says nothing to a prefill service, which has its own settings",
                hint=f"leave {option} or --service out",
            )
        raise UsageError(f"{option} goes with --service", hint="without a service, documents are published at once, in order")


def unfulfilled(store: BlobStore, result: PublishResult, settings: PublisherSettings) -> list[tuple[str, str]]:
    """What was asked for and is not so, as rows: a precision that is too coarse, and what a manifest keeps for ever."""
    rows = []
    if result.precision != settings.precision:
        bound = f"--min-quality {settings.min_quality:g}" if settings.min_quality is not None else "what is asked"
        rows.append(("finer", f"{settings.precision} is not within {bound}, so this is {result.precision}"))
    if result.status == "exists" and (settings.label or settings.days) and (kept := _kept(store, result, settings)):
        rows.append(("stays", f"{kept}: to change that, kvcdn rm {result.address[:12]} and publish anew"))
    return rows


def _kept(store: BlobStore, result: PublishResult, settings: PublisherSettings) -> str:
    from kvcdn.digest import Digest  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.keys import manifest_key, model_tag  # noqa: PLC0415
    from kvcdn.origin.upkeep.catalog import read_manifest  # noqa: PLC0415

    fingerprint, address = (Digest(bytes.fromhex(text)) for text in (result.fingerprint, result.address))
    info = store.stat(manifest_key(model_tag(fingerprint), address))
    listed = read_manifest(store, info) if info else None
    if listed is None or listed.manifest is None:
        return ""
    label, expires = listed.manifest.label, listed.manifest.expires
    kept = [f"its label, {label!r}"] if settings.label and label != settings.label else []
    if settings.days:
        kept.append("that it never expires" if expires is None else f"its expiry, {day(expires)}")
    return " and ".join(kept)
