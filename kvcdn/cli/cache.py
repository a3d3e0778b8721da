"""`kvcdn cache`: what this host keeps of fetched caches, decoded, for all processes of the user."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.options import AsJson
from kvcdn.cli.output import note, print_json, print_table, print_text, size
from kvcdn.errors import NotFoundError

if TYPE_CHECKING:
    from kvcdn.digest import ModelTag
    from kvcdn.stores.local import LocalStore, StoredPrefix

app = typer.Typer(help="The local store: what was fetched to this host.", no_args_is_help=True, rich_markup_mode=None)

OfModel = Annotated[str | None, typer.Option("--model", "-m", help="Of this model only: its tag, fingerprint or name.")]


@app.callback()
def _cache() -> None:
    """The local store: what was fetched to this host, decoded, to be mapped by all processes of yours."""


@app.command("ls")
def list_prefixes(model: OfModel = None, *, as_json: AsJson = False) -> None:
    """List the prefixes that are kept, last used first.

    Whoever can read these files can reconstruct the text: the folder is yours alone.
    """
    store = _store()
    tags = None if model is None else _tags(store, model)
    found = [one for one in store.stored() if tags is None or (one.header is not None and one.header.model in tags)]
    if as_json:
        listed = [_describe(one) for one in found]
        print_json({"folder": str(store.folder), "capacity": store.capacity, "prefixes": listed})
        return
    if found:
        rows = [_row(one) for one in found]
        print_table(["MODEL", "NAME", "TOKENS", "BLOCKS", "ON DISK", "LAST USED"], rows)
    total = sum(one.bytes for one in found)
    note(f"{len(found):,} prefixes in {store.folder}, {size(total)} of at most {size(store.capacity)}")


@app.command()
def clear(model: OfModel = None, *, as_json: AsJson = False) -> None:
    """Remove what is kept, all of it or of one model. Processes that have mapped a prefix keep it until they end."""
    store = _store()
    counts = [store.clear(tag) for tag in ([None] if model is None else _tags(store, model))]
    removed, total = (sum(values) for values in zip(*counts, strict=True))
    if as_json:
        print_json({"folder": str(store.folder), "removed": removed, "bytes": total})
    else:
        print_text(f"removed {removed:,} prefixes, {size(total)}")


def _store() -> LocalStore:
    from kvcdn.stores.local import LocalStore  # noqa: PLC0415 - see kvcdn.cli

    # A store that is switched off may still have been filled before.
    return LocalStore.configured() or LocalStore()


def _tags(store: LocalStore, model: str) -> list[ModelTag]:
    """The tags of the models that are called `model`. Raises NotFoundError where nothing of it is kept."""
    headers = [one.header for one in store.stored() if one.header is not None]
    from kvcdn.digest import Digest  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.keys import model_tag  # noqa: PLC0415

    fingerprint = Digest.read(model)
    tag = str(model_tag(fingerprint)) if fingerprint else model
    tags = {header.model for header in headers if tag in (str(header.model), header.model_name)}
    if not tags:
        raise NotFoundError(f"nothing of {model} is kept in {store.folder}", hint="kvcdn cache ls shows what is")
    return sorted(tags)


def _describe(one: StoredPrefix) -> dict[str, object]:
    header = one.header
    return {
        "file": one.name,
        "model": None if header is None else str(header.model),
        "model_name": None if header is None else header.model_name,
        "tokens": None if header is None else header.tokens,
        "blocks": None if header is None else len(header.blocks),
        "bytes": one.bytes,
        "used": int(one.used),
    }


def _row(one: StoredPrefix) -> list[str]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
    if one.header is None:
        return ["-", "damaged", "-", "-", size(one.bytes), used]
    header = one.header
    return [str(header.model), header.model_name, f"{header.tokens:,}", str(len(header.blocks)), size(one.bytes), used]
