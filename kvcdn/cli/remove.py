"""`kvcdn rm` and `kvcdn retire`: take documents back from an origin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.options import AsJson, Endpoint, KeyFile, OwnOrigin, open_journal, open_origin
from kvcdn.cli.output import counted, note, print_json, print_pairs, size, ticking
from kvcdn.errors import UsageError

if TYPE_CHECKING:
    from kvcdn.origin.upkeep.remove import Removal


def remove(
    addresses: Annotated[
        list[str],
        typer.Argument(help="Documents' addresses, the beginnings of them, or their object keys.", metavar="ADDRESS..."),
    ],
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    key: KeyFile = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Remove documents from an origin: their manifests, then the blocks that no other document begins with.

    Edges keep copies until these are evicted or purged. The origin's journal says who removed what.
    """
    from kvcdn.origin.upkeep.catalog import find_manifest  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.remove import remove_documents  # noqa: PLC0415

    store = open_origin(origin, endpoint)
    infos = {info.key: info for info in (find_manifest(store, address) for address in addresses)}
    removed = remove_documents(store, list(infos.values()), ticking(), open_journal(store, key))
    if as_json:
        print_json({"origin": store.url, "removed": sorted(infos), "models": [removal.to_json() for removal in removed]})
    else:
        for removal in removed:
            _show(removal)


def retire(
    model: Annotated[str, typer.Option("--model", "-m", help="The model's tag, fingerprint, or the name it was published by.")],
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    key: KeyFile = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove everything that is published of a model: all documents of one fingerprint."""
    from kvcdn.origin.upkeep.catalog import find_model, manifest_infos  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.remove import retire_model  # noqa: PLC0415

    store, progress = open_origin(origin, endpoint), ticking()
    tag = find_model(store, model, progress)
    if not yes:
        count = sum(1 for _ in manifest_infos(store, tag))
        question = f"remove all {count:,} documents of model {tag} from {store.url}"
        if as_json or not sys.stdin.isatty():
            raise UsageError(f"would {question}: not without being told so", hint="add --yes")
        typer.confirm(f"{question[0].upper()}{question[1:]}?", abort=True, err=True)
    removal = retire_model(store, tag, progress, open_journal(store, key))
    if as_json:
        print_json({"origin": store.url, **removal.to_json()})
    else:
        _show(removal)


def _show(removal: Removal) -> None:
    print_pairs(
        [
            ("model", removal.model_tag),
            ("removed", f"{counted(removal.documents, 'document')}, {counted(removal.blocks, 'block')}, {size(removal.bytes)}"),
            ("kept", f"{removal.blocks_shared:,} blocks that other documents begin with"),
        ]
    )
    if removal.blocks_held:
        note(f"{removal.blocks_held:,} blocks stay as a publisher may rely on them; kvcdn gc removes them if no document comes")
    if removal.unreadable:
        note(f"{removal.unreadable:,} documents could not be read and were removed without their blocks; kvcdn gc finds those")
