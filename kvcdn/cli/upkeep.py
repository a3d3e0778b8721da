"""`kvcdn gc` and `kvcdn fsck`: keep an origin in order."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.options import AsJson, Endpoint, KeyFile, OwnOrigin, open_journal, open_origin
from kvcdn.cli.output import counted, note, print_json, print_pairs, print_text, size, ticking
from kvcdn.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from kvcdn.origin.upkeep.check import Checked
    from kvcdn.origin.upkeep.collect import Collected

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_SHOWN = 50
"""Problems shown to people; --json has all of them."""


def collect(
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    grace: Annotated[
        str,
        typer.Option(
            help="Age from which a block without a document goes: 24h, 30m, 7d, 0s. An interrupted publish resumes from it."
        ),
    ] = "24h",
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove documents that have expired, and blocks that no document names.

    Safe beside running publishers. A model of which a manifest cannot be read is left alone, with exit code 4.
    """
    from kvcdn.origin.upkeep.collect import collect_garbage  # noqa: PLC0415 - see kvcdn.cli

    seconds, store = parse_duration(grace), open_origin(origin, endpoint)
    found = collect_garbage(store, grace_seconds=seconds, dry_run=dry_run, progress=ticking())
    if as_json:
        print_json({"origin": store.url, "grace_seconds": seconds, **found.to_json()})
    else:
        _show_collected(found)
    if not found.models:
        note(f"nothing is published at {store.url}")
    for skipped in found.skipped:
        note(f"kvcdn: model {skipped['model_tag']} was left alone: {skipped['reason']}\n       {skipped['hint']}")
    if found.skipped:
        raise typer.Exit(CorruptError.exit_code)


def check(
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only this model: its name, tag or fingerprint.")] = None,
    key: KeyFile = None,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not read blocks: only whether they are there, and as long as they should be.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Remove what is corrupt or incomplete, manifests first, so that publishing again makes it anew."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check an origin: every document complete, every hash and signature right, everything under its own name.

    Ends with 4 where something is corrupt, with 3 where only blocks are missing, also after a repair, which cannot bring back
    what is lost: it removes, and says which documents have to be published again.
    """
    from kvcdn.origin.upkeep.catalog import find_model  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.check import check_origin  # noqa: PLC0415

    store, progress = open_origin(origin, endpoint), ticking()
    journal = partial(open_journal, store, key)
    tag = find_model(store, model, progress) if model is not None else None
    found = check_origin(store, tag=tag, read_blocks=not quick, repair=repair, progress=progress, journal=journal)
    if as_json:
        print_json({"origin": store.url, **found.to_json()})
    else:
        _show_checked(found)
    if not found.models:
        note(f"nothing is published at {store.url}")
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def parse_duration(text: str) -> float:
    """Seconds of `24h`, `30m`, `7d`, `90s`. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text.strip().lower())
    if match is None:
        raise UsageError(f"{text[:40]!r} is not a time", hint="write a number and s, m, h or d: 24h")
    return float(int(match[1]) * _UNITS[match[2]])


def _show_collected(found: Collected) -> None:
    removed = "would remove" if found.dry_run else "removed"
    expired = counted(found.documents_expired, "expired document")
    gone = f"{counted(found.blocks_removed, 'block')}, {size(found.bytes_freed)}, {counted(found.leftovers, 'leftover')}"
    documents = f"{counted(found.documents, 'document')} of {counted(found.models, 'model')}"
    young = f"{counted(found.blocks_young, 'block')}, {size(found.bytes_young)}"
    print_pairs(
        [
            (removed, f"{expired}, {gone}"),
            ("kept", f"{documents}, {counted(found.blocks_kept, 'block')}"),
            ("waiting", f"{young}, of no document but younger than the grace period"),
        ]
    )
    if found.blocks_held:
        note(f"{found.blocks_held:,} blocks stay as a publisher may rely on them")


def _show_checked(found: Checked) -> None:
    for problem in found.problems[:_SHOWN]:
        hurt = f" ({counted(problem.documents, 'document')})" if problem.documents else ""
        print_text(f"{problem.kind}: {problem.object}{hurt}: {problem.reason}")
    if len(found.problems) > _SHOWN:
        print_text(f"and {len(found.problems) - _SHOWN:,} more: see --json")
    how = "read and verified" if found.read_blocks else "there and of the right size (their bytes were not read)"
    documents = f"{found.documents:,} of {counted(found.models, 'model')}"
    orphans = f"{counted(found.orphan_blocks, 'block')}, {size(found.orphan_bytes)}"
    print_pairs(
        [
            ("documents", f"{documents}, {len(found.documents_damaged):,} of them damaged"),
            ("blocks", f"{found.blocks:,}, {size(found.bytes)}: {how}"),
            ("orphans", f"{orphans}, that no document names: kvcdn gc removes them"),
        ]
    )
    if found.repaired and found.problems:
        print_pairs([("repaired", f"{found.manifests_removed:,} manifests and {found.blocks_removed:,} blocks were removed")])
        for address in found.documents_damaged[:_SHOWN]:
            note(f"publish again: {address}")
    if found.blocks_held:
        note(f"{found.blocks_held:,} corrupt blocks stay while a publisher relies on them; repair again when it has ended")
