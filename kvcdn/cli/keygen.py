"""`kvcdn keygen`: signing keys, namespaces, and whom to trust."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcdn.cli.options import AsJson
from kvcdn.cli.output import print_json, print_pairs
from kvcdn.errors import UsageError


def keygen(
    name: Annotated[str, typer.Option(help="Name of the signing key.")] = "default",
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Make a namespace secret instead.")] = None,
    trust: Annotated[str | None, typer.Option(help="Trust this publisher's public key instead.")] = None,
    label: Annotated[str, typer.Option("--as", help="Your name for the publisher you trust.")] = "",
    *,
    show: Annotated[bool, typer.Option("--show", help="Show the public key that is there; make nothing.")] = False,
    encrypt: Annotated[
        bool,
        typer.Option("--encrypt", help="Encrypt the new key under a passphrase: asked for, or as the environment names it."),
    ] = False,
    protect: Annotated[
        bool, typer.Option("--protect", help="Encrypt the key that is there, or change its passphrase; make nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a signing key (and trust it), make the secret of a private namespace, or trust another publisher.

    A passphrase is never an argument: it is asked for at a terminal, or read from the file that KVCDN_KEY_PASSPHRASE_FILE
    names, or from KVCDN_KEY_PASSPHRASE. A new one in place of an old one (--protect) comes from KVCDN_NEW_KEY_PASSPHRASE_FILE.
    """
    if sum((namespace is not None, trust is not None, show, encrypt, protect)) > 1:
        raise UsageError(
            "--namespace, --trust, --show, --encrypt and --protect are different things to do", hint="give one of them"
        )
    if namespace is not None:
        result = _make_namespace(namespace)
    elif trust is not None:
        result = _trust(trust, label)
    else:
        result = _signing_key(name, show=show, encrypt=encrypt, protect=protect)
    if as_json:
        print_json(result)
    else:
        print_pairs([(key.replace("_", " "), value) for key, value in result.items()])


def _signing_key(name: str, *, show: bool, encrypt: bool, protect: bool) -> dict[str, str]:
    from kvcdn.cli.options import signing_key  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.cli.passphrase import new_passphrase  # noqa: PLC0415
    from kvcdn.keyring import (  # noqa: PLC0415
        create_signing_key,
        protect_signing_key,
        signing_key_encrypted,
        signing_key_path,
    )

    path = signing_key_path(name)
    if show or protect:
        key = signing_key(path)
    if protect:
        protect_signing_key(path, key, new_passphrase(path, replaces=signing_key_encrypted(path)))
    elif not show:
        if encrypt and path.exists():
            raise UsageError(f"{path} exists already", hint=f"encrypt it with: kvcdn keygen --name {name} --protect")
        key = create_signing_key(path, new_passphrase(path, replaces=False) if encrypt else None)
    return {
        "public_key": key.public.text,
        "file": str(path),
        "protection": "passphrase" if signing_key_encrypted(path) else "file permission",
    }


def _make_namespace(name: str) -> dict[str, str]:
    from kvcdn.keyring import create_namespace  # noqa: PLC0415 - see kvcdn.cli

    return {"namespace": name, "file": str(create_namespace(name)), "next": "copy the file to every publisher and reader"}


def _trust(text: str, label: str) -> dict[str, str]:
    from kvcdn.keyring import trust_path, trust_publisher  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.signing import PublicKey  # noqa: PLC0415

    key = PublicKey.from_text(text)
    added = trust_publisher(key, label)
    return {"trusted": key.text, "file": str(trust_path()), "status": "added" if added else "was on the list"}
