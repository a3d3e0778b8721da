"""Options that several commands share, and what they open."""

from __future__ import annotations

import enum
import os
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.output import note
from kvcdn.errors import UnavailableError, UsageError
from kvcdn.paths import data_dir

if TYPE_CHECKING:
    from kvcdn.client.sources.source import Source
    from kvcdn.origin.upkeep.journal import Journal
    from kvcdn.signing import SigningKey, TrustList
    from kvcdn.store import BlobStore

Model = Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder, hub id, or alias such as smollm2-135m.")]
Adapter = Annotated[
    list[Path] | None,
    typer.Option("--adapter", help="Folder of a LoRA adapter that the model applies; several are applied in this order."),
]
Origin = Annotated[
    str | None,
    typer.Option(envvar="KVCDN_ORIGIN", help="A folder, s3://bucket/prefix, or http(s)://host. Default: a folder of yours."),
]
OwnOrigin = Annotated[
    str | None,
    typer.Option("--origin", envvar="KVCDN_ORIGIN", help="A folder or s3://bucket/prefix. Default: a folder of yours."),
]
"""An origin that is listed or written to, which web servers cannot be."""

Endpoint = Annotated[str | None, typer.Option(help="S3 endpoint, for a server that is not AWS.")]
Edge = Annotated[
    list[str] | None,
    typer.Option(
        envvar="KVCDN_EDGE",
        help="URL of an edge, to be used in place of the origin; several times, or with commas, for several edges.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(envvar="KVCDN_TOKEN", help="Bearer token for the edge, or the service.", show_envvar=True),
]
NamespaceName = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Private namespace; its secret must be on this machine.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Put the document into the model's chat template, as the system message.")]
TrustFile = Annotated[Path | None, typer.Option("--trust", help="Trust list to use in place of yours.")]
Precisions = Annotated[
    str,
    typer.Option(
        "--precision",
        help="What you accept, most wanted first, with commas: native is exact, the others are lossy.",
    ),
]
MaxKl = Annotated[
    float | None, typer.Option("--max-kl", min=0, help="Largest mean next-token KL, in nats, that a lossy cache may have.")
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1.")]
Local = Annotated[
    bool, typer.Option("--local/--no-local", help="Look into the local store, and keep there what is fetched (kvcdn cache).")
]
KeyFile = Annotated[Path | None, typer.Option("--key", help="Signing key (PEM) to use in place of yours.")]
UsageFile = Annotated[
    Path | None,
    typer.Option("--usage", envvar="KVCDN_USAGE", help="Ledger, a SQLite file, to count in (kvcdn usage); made if need be."),
]
Measured = Annotated[Path | None, typer.Option("--document", help="A text file; by default one found on this machine.")]
Runs = Annotated[int, typer.Option(min=1, help="Counted runs of each kind; 5 or more for a median to quote.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Mode(enum.StrEnum):
    """Ways to a cache, as `kvcdn.client.planning.plan` has them."""

    AUTO = "auto"
    FETCH = "fetch"
    COMPUTE = "compute"
    BOTH = "both"


def open_origin(origin: str | None, endpoint: str | None) -> BlobStore:
    """The store that --origin names, by default the user's own folder. Reads and writes, but for http(s)."""
    from kvcdn.stores import open_store  # noqa: PLC0415 - see kvcdn.cli

    return open_store(origin or default_origin(), endpoint=endpoint)


def default_origin() -> str:
    """The user's own folder, which is there from now on."""
    folder = data_dir() / "origin"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UnavailableError(f"cannot make {folder}: {error.strerror}", hint="name an origin with --origin") from None
    return str(folder)


def open_source(edges: list[str] | None, origin: str | None, endpoint: str | None, token: str | None) -> Source:
    """The source that --edge or --origin names, by default the user's own folder."""
    from kvcdn.client.sources.sources import open_source as open_  # noqa: PLC0415 - see kvcdn.cli

    urls = [url.strip() for edge in edges or () for url in edge.split(",") if url.strip()]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"--edge takes a URL such as http://127.0.0.1:8400, not {url!r}", hint="for a folder or bucket use --origin"
            )
    if urls:
        return open_(urls, token=token)
    return open_(origin or default_origin(), endpoint=endpoint)


def signing_key(path: Path | None, *, create: bool = True) -> SigningKey:
    """The key at `path`, or the user's, which is made if there is none and `create` is set; a passphrase may be asked for."""
    from kvcdn.cli.passphrase import passphrase_for  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.keyring import load_or_create_signing_key, load_signing_key, signing_key_path  # noqa: PLC0415

    own = signing_key_path()
    if path is not None or not create:
        return load_signing_key(path or own, passphrase_for(path or own))
    signer, new = load_or_create_signing_key(own, passphrase_for(own))
    if new:
        note(f"made your signing key {own}; readers trust it with: kvcdn keygen --trust {signer.public.text}")
    return signer


def open_journal(store: BlobStore, key: Path | None) -> Journal:
    """The journal of `store`, to be signed with the key at `key`, or the user's."""
    from kvcdn.origin.upkeep.journal import Journal  # noqa: PLC0415 - see kvcdn.cli

    return Journal(store, signing_key(key))


def trust_list(path: Path | None) -> TrustList:
    """The trust list at `path`, or the user's."""
    from kvcdn.keyring import load_trust  # noqa: PLC0415 - see kvcdn.cli

    return load_trust(path)


def quiet_libraries() -> None:
    """Keeps transformers' own progress bars and advice out of our output. Only the program does this; the SDK does not."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging  # noqa: PLC0415 - see kvcdn.cli

    logging.disable_progress_bar()


def on_command_line(ctx: typer.Context) -> set[str]:
    """The parameters that were given as options or arguments, and not by a default or a variable."""
    # By name: typer may carry a click of its own, whose enum is another.
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def refuse_others(ctx: typer.Context, option: str, beside: AbstractSet[str]) -> None:
    """What goes with `option` has its own assumptions: options but those `beside` would be ignored, so they are refused."""
    others = sorted(on_command_line(ctx) - {option, *beside})
    if others:
        raise UsageError(
            f"--{option} has its own assumptions and takes no --{others[0].replace('_', '-')}",
            hint=f"leave --{option} out to compute with yours",
        )
