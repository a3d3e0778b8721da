"""`kvcdn pins` and `kvcdn unpin`: the documents that an edge keeps whatever else is asked for."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from kvcdn.cli.edge_order import AdminEdge, count, look, order
from kvcdn.cli.options import AsJson, Token
from kvcdn.cli.output import counted, print_json, print_text, size
from kvcdn.digest import Digest
from kvcdn.errors import CorruptError, UsageError


def pins(edge: AdminEdge, token: Token = None, *, as_json: AsJson = False) -> None:
    """List the documents that are pinned at an edge, oldest first (kvcdn warm --pin pins them)."""
    answer = look(edge, "/v1/pins", token)
    used, limit = count(answer, "bytes", edge), count(answer, "limit", edge)
    listed = answer.get("pins")
    if not isinstance(listed, list) or not all(isinstance(pin, dict) for pin in listed):
        raise CorruptError(f"{edge} does not answer as an edge does: pins is no list")
    if as_json:
        print_json({"edge": edge, "pins": listed, "bytes": used, "limit": limit})
        return
    for pin in listed:
        print_text(_line(pin, edge))
    print_text(f"{counted(len(listed), 'document')}, {size(used)} of the {size(limit)} that pins may take")


def unpin(
    edge: AdminEdge,
    addresses: Annotated[
        list[str] | None, typer.Argument(help="Addresses of pinned manifests, in full.", metavar="[ADDRESS]...")
    ] = None,
    token: Token = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let documents that are pinned at an edge leave it like any other. They are not deleted by this."""
    if bool(addresses) == everything:
        raise UsageError("name what is to be pinned no more: addresses of manifests, or --all", hint="kvcdn pins lists them")
    if any(Digest.read(address) is None for address in addresses or ()):
        raise UsageError("an address has 64 lowercase hexadecimal digits", hint="kvcdn pins --json shows them in full")
    answer = order(edge, "/v1/unpin", token, {"all": True} if everything else {"manifests": addresses})
    documents = count(answer, "documents", edge)
    if as_json:
        print_json({"edge": edge, "documents": documents})
    else:
        print_text(f"{documents:,} documents are pinned no more at {edge}")


def _line(pin: dict[str, Any], edge: str) -> str:
    objects, here, taken = (count(pin, name, edge) for name in ("objects", "here", "bytes"))
    since = pin.get("since")
    day = time.strftime("%Y-%m-%d", time.gmtime(since)) if isinstance(since, int | float) and 0 <= since < 1 << 40 else "?"
    address = Digest.read(str(pin.get("manifest")))
    return f"{address or '?'}  {size(taken)}  {here:,} of {objects:,} objects are here  since {day}"
