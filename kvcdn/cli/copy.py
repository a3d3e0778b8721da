"""`kvcdn cp`: copy documents from one origin to another."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from kvcdn.cli.options import AsJson, KeyFile, TrustFile, open_journal, signing_key, trust_list
from kvcdn.cli.output import counted, note, print_json, print_pairs, size, ticking
from kvcdn.errors import CorruptError, KvcdnError, UsageError


def copy(
    source: Annotated[str, typer.Argument(help="The origin to copy from: a folder or s3://bucket/prefix.")],
    target: Annotated[str, typer.Argument(help="The origin to copy to: a folder or s3://bucket/prefix.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only this model: its name, tag or fingerprint.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="S3 endpoint of the source, for a server that is not AWS.")] = None,
    to_endpoint: Annotated[str | None, typer.Option(help="S3 endpoint of the target.")] = None,
    key: KeyFile = None,
    trust: TrustFile = None,
    *,
    resign: Annotated[
        bool,
        typer.Option(
            "--resign", help="Sign the copies with your key, or --key; only what publishers on your trust list signed."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy documents between origins: blocks first, the manifest last, every hash checked on the way, nothing overwritten.

    Run it again to take up an interrupted copy, or to bring over what is new. Nothing is removed at the target. With --resign
    the copies are yours: readers then need to trust only your key, and you answer for what the publishers said. Credentials are
    the same for both; a profile for one of them goes into its URL: s3://bucket/prefix?profile=NAME.
    """
    from kvcdn.origin.upkeep.catalog import find_model  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.copy import Resigner, copy_documents  # noqa: PLC0415
    from kvcdn.origin.upkeep.rotation import revoked_publishers  # noqa: PLC0415
    from kvcdn.revocation import Revocations  # noqa: PLC0415
    from kvcdn.stores import open_store  # noqa: PLC0415

    from_store, to_store, progress = open_store(source, endpoint=endpoint), open_store(target, endpoint=to_endpoint), ticking()
    tag = find_model(from_store, model, progress) if model is not None else None
    if from_store.url == to_store.url:
        raise UsageError("source and target are the same origin, where nothing is overwritten", hint="name another target")
    if key is not None:
        signing_key(key)  # a wrong one is told before anything is copied
    journal = partial(open_journal, to_store, key)
    resigner = None
    if resign:
        trusted = trust_list(trust)
        resigner = Resigner(signing_key(key), trusted.revoking(revoked_publishers(from_store, trusted, Revocations())))
    copied = copy_documents(from_store, to_store, tag=tag, progress=progress, journal=journal, resigner=resigner)
    if as_json:
        print_json({"source": from_store.url, "target": to_store.url, **copied.to_json()})
    else:
        there = counted(copied.blocks_existed, "block")
        print_pairs(
            [
                ("copied", f"{counted(copied.documents, 'document')}, {counted(copied.blocks, 'block')}, {size(copied.bytes)}"),
                ("there", f"{counted(copied.existed, 'document')}, and {there} of those copied"),
            ]
        )
    if not (copied.documents or copied.existed or copied.damaged or copied.untrusted or copied.conflicts):
        note(f"nothing is published at {from_store.url}")
    for failure in (*copied.damaged, *copied.untrusted, *copied.conflicts):
        note(f"kvcdn: not copied: {failure['object']}: {failure['reason']}")
    if copied.conflicts:
        note("       publish these at the target: its blocks are others than the source's")
    if copied.damaged or copied.untrusted:
        raise typer.Exit(CorruptError.exit_code)
    if copied.conflicts:
        raise typer.Exit(KvcdnError.exit_code)
