"""`kvcdn purge`: have an edge delete cached objects."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcdn.cli.edge_order import AdminEdge, count, order
from kvcdn.cli.options import AsJson, Token
from kvcdn.cli.output import print_json, print_text, size
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import UsageError


def purge(
    edge: AdminEdge,
    addresses: Annotated[
        list[str] | None, typer.Argument(help="Addresses of manifests or blocks, in full.", metavar="[ADDRESS]...")
    ] = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="Everything of the model with this tag.")] = None,
    token: Token = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete objects from an edge's disk: by address, by model, or all.

    What the origin still has comes back when somebody asks for it: remove (kvcdn rm) or revoke (kvcdn revoke) it there first.
    """
    if sum(map(bool, (addresses, model, everything))) != 1:
        raise UsageError("name what is to go: addresses, --model, or --all", hint="one of these at a time")
    if everything:
        answer = order(edge, "/v1/purge", token, {"all": True})
    elif model:
        if any(ModelTag.read(tag) is None for tag in model):
            raise UsageError("--model takes a model's tag, 32 hexadecimal digits", hint="kvcdn ls --json shows tags")
        answer = order(edge, "/v1/purge", token, {"models": model})
    else:
        if any(Digest.read(address) is None for address in addresses or ()):
            raise UsageError("an address has 64 lowercase hexadecimal digits", hint="kvcdn ls --json shows them in full")
        answer = order(edge, "/v1/purge", token, {"addresses": addresses})
    objects, gone = count(answer, "objects", edge), count(answer, "bytes", edge)
    if as_json:
        print_json({"edge": edge, "objects": objects, "bytes": gone})
    else:
        print_text(f"{objects:,} objects, {size(gone)}, are gone from {edge}")
