"""`kvcdn rotate-key`: a new signing key in the place of the old one, which says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcdn.cli.options import AsJson, Endpoint, open_origin, signing_key
from kvcdn.cli.output import note, print_json, print_pairs
from kvcdn.errors import UsageError

if TYPE_CHECKING:
    from kvcdn.signing import SigningKey
    from kvcdn.store import BlobStore


def rotate_key(
    name: Annotated[str | None, typer.Option(help="Name of the signing key; without it, default.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="File of the signing key (PEM), in place of a name.")] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="Where the statement goes; several times for several origins. Default: as everywhere."),
    ] = None,
    endpoint: Endpoint = None,
    announce: Annotated[
        Path | None,
        typer.Option(help="Make no key: say at --origin that the present key comes after the one in this file."),
    ] = None,
    *,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Encrypt the new key, also where the old one is not.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a new signing key, have the old one name it as its successor at an origin, and sign with it from now on.

    Readers keep trusting the old key; they take the new one with: kvcdn trust follow OLD-KEY. What the old key signed is not
    signed anew and stays good. What it revoked the new key revokes, too. If the old key was stolen, this is not enough: tell
    readers the new key yourself, and revoke the old one (kvcdn revoke --publisher). An interrupted run is taken up again.
    """
    from kvcdn.keyring import signing_key_path  # noqa: PLC0415 - see kvcdn.cli

    if name is not None and key is not None:
        raise UsageError("--name and --key both say which key", hint="give one of them")
    path = key or signing_key_path(name or "default")
    named: list[str | None] = [*(origin or [])] or [os.environ.get("KVCDN_ORIGIN") or None]
    stores = [open_origin(url, endpoint) for url in named]
    if announce is not None:
        result = _announce(stores, signing_key(announce), signing_key(path))
    else:
        result = _rotate(stores, path, encrypt=encrypt)
    if as_json:
        print_json(result)
        return
    told = [f"{each['origin']}{' (it knew already)' if each['existed'] else ''}" for each in result["origins"]]
    print_pairs(
        [
            *(
                (word.replace("_", " "), str(result[word]))
                for word in ("old_key", "new_key", "file", "old_file")
                if word in result
            ),
            ("said at", ", ".join(told)),
            ("readers", f"kvcdn trust follow {result['old_key']}"),
        ]
    )


def _rotate(stores: list[BlobStore], path: Path, *, encrypt: bool) -> dict[str, Any]:
    from kvcdn.cli.passphrase import new_passphrase  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.keyring import (  # noqa: PLC0415
        create_next_key,
        next_key_path,
        replace_signing_key,
        signing_key_encrypted,
    )

    old, beside = signing_key(path), next_key_path(path)
    if beside.exists():
        note(f"going on with the key in {beside}, which an interrupted run has made")
        new = signing_key(beside)
    else:
        protected = encrypt or signing_key_encrypted(path)
        new, _ = create_next_key(path, new_passphrase(path, replaces=False) if protected else None)
    # First every origin knows of it: a key that signs and is named nowhere would be a stranger's to every reader.
    result = _announce(stores, old, new)
    kept = replace_signing_key(path, old, new)
    return {**result, "file": str(path), "old_file": str(kept)}


def _announce(stores: list[BlobStore], old: SigningKey, new: SigningKey) -> dict[str, Any]:
    from kvcdn.keyring import keep_revocations  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.rotation import announce_successor  # noqa: PLC0415

    origins = []
    for store in stores:
        done = announce_successor(store, old, new)
        if done.revocations_object is not None:
            keep_revocations(done.revocations_object)
        listed = done.revocations.version if done.revocations else None
        origins.append({"origin": store.url, "existed": done.existed, "revocations": listed})
    return {"old_key": old.public.text, "new_key": new.public.text, "origins": origins}
