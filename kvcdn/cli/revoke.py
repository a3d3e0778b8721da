"""`kvcdn revoke`: have readers refuse documents, publishers' keys and models, wherever copies lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.inspect import day
from kvcdn.cli.options import AsJson, Endpoint, KeyFile, OwnOrigin, open_origin, signing_key
from kvcdn.cli.output import counted, note, print_json, print_pairs, ticking
from kvcdn.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from kvcdn.digest import Digest
    from kvcdn.revocation import RevocationList
    from kvcdn.store import BlobStore

_SECONDS_PER_DAY = 86400


def revoke(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(help="Documents' addresses, the beginnings of them, or their object keys.", metavar="[ADDRESS]..."),
    ] = None,
    publisher: Annotated[
        list[str] | None, typer.Option("--publisher", help="A publisher's public key: nothing it signed is taken any more.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="A model's tag, fingerprint, or the name it was published by.")
    ] = None,
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    key: KeyFile = None,
    days: Annotated[int, typer.Option(min=1, max=400, help="Days until the list has to be renewed.")] = 90,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Take back what was revoked.")] = False,
    renew: Annotated[bool, typer.Option("--renew", help="Only have the list last for another --days.")] = False,
    as_json: AsJson = False,
) -> None:
    """Sign a list of what must not be used any more, for readers who trust your key.

    Nothing is deleted: kvcdn rm and kvcdn retire do that, and cannot reach copies.
    """
    from kvcdn.keyring import keep_revocations  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.catalog import find_model  # noqa: PLC0415
    from kvcdn.origin.upkeep.journal import Journal  # noqa: PLC0415
    from kvcdn.origin.upkeep.revocation import Targets, change_revocations  # noqa: PLC0415
    from kvcdn.signing import PublicKey  # noqa: PLC0415

    named = bool(addresses or publisher or model)
    if renew and (named or undo):
        raise UsageError("--renew changes nothing but the date: it takes nothing to revoke", hint="leave it or the rest out")
    if not renew and not named:
        raise UsageError("there is nothing to revoke", hint="name addresses, --publisher or --model; or only --renew")
    store, signer = open_origin(origin, endpoint), signing_key(key, create=False)
    targets = Targets(
        _named(store, addresses or [], undo=undo),
        frozenset(PublicKey.from_text(text) for text in publisher or ()),
        frozenset(find_model(store, name) for name in model or ()),
    )
    made, data = change_revocations(
        store, signer, targets, undo=undo, seconds=days * _SECONDS_PER_DAY, journal=Journal(store, signer)
    )
    keep_revocations(data)
    _show(made, signer.public.text, as_json=as_json)


def _named(store: BlobStore, addresses: list[str], *, undo: bool) -> frozenset[Digest]:
    from kvcdn.digest import Digest  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.catalog import find_manifest  # noqa: PLC0415
    from kvcdn.origin.upkeep.revocation import document_addresses  # noqa: PLC0415

    infos, bare = {}, set()
    for text in addresses:
        try:
            info = find_manifest(store, text)
            infos[info.key] = info
        except NotFoundError:
            whole = Digest.read(text)
            if whole is None:
                raise
            # It may have been removed already, and lie at edges and readers still.
            bare.add(whole)
    found = document_addresses(store, infos.values(), ticking())
    if len(found) < 2 * len(infos) and not undo:
        note("a document has no block of its own: other documents go on like it, and readers may use those still")
    return found | bare


def _show(made: RevocationList, signer: str, *, as_json: bool) -> None:
    if as_json:
        lists = {name: sorted(str(item) for item in getattr(made, name)) for name in ("addresses", "publishers", "models")}
        print_json({"signer": signer, "version": made.version, "created": made.created, "expires": made.expires, **lists})
        return
    addresses, publishers, models = (
        counted(len(many), noun)
        for many, noun in ((made.addresses, "address"), (made.publishers, "publisher"), (made.models, "model"))
    )
    print_pairs(
        [
            ("signer", signer),
            ("list", f"number {made.version}, to be renewed before {day(made.expires)}"),
            ("revoked", f"{addresses}, {publishers}, {models}"),
        ]
    )
