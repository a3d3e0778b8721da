"""`kvcdn warm`: have an edge fetch a document ahead of its readers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcdn.cli.edge_order import AdminEdge, count, order
from kvcdn.cli.options import Adapter, AsJson, Chat, Model, NamespaceName, Token, quiet_libraries
from kvcdn.cli.output import print_json, print_text, size, ticking
from kvcdn.digest import Digest, ModelTag
from kvcdn.errors import UnavailableError, UsageError

PAUSE_SECONDS = 0.25
"""Between two looks at how far it is: an order costs the edge a lookup of each block in memory."""

STILL_SECONDS = 120.0
"""An edge on which nothing comes forward for this long has stopped, or drops what it fetches: its cache is too small."""


def warm(
    document: Annotated[str, typer.Argument(help="A document (a text file, a URL, or -), or its address in full.")],
    model: Model,
    edge: AdminEdge,
    adapter: Adapter = None,
    namespace: NamespaceName = None,
    precision: Annotated[str, typer.Option(help="The precision it was published in.")] = "native",
    token: Token = None,
    *,
    chat: Chat = False,
    pin: Annotated[bool, typer.Option("--pin", help="Have it stay there until kvcdn unpin or kvcdn purge.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have an edge fetch a published document now, and wait until all of it is there.

    With an address, --model may be the model's tag: then no model is looked at. What is already there is not fetched again.
    """
    asked, started = _asked(document, model, adapter, namespace, precision, chat=chat), time.monotonic()
    asked |= {"pin": True} if pin else {}
    tick, best, moved = ticking(), -1, started
    while True:
        answer = order(edge, "/v1/warm", token, asked)
        objects, here, waiting = (count(answer, name, edge) for name in ("objects", "here", "waiting"))
        there = count(answer, "bytes", edge)
        now = time.monotonic()
        if here >= objects:
            break
        if here > best:
            best, moved = here, now
        if not waiting and answer.get("trouble"):
            raise UnavailableError(f"{edge} has {here:,} of {objects:,} objects: {str(answer['trouble'])[:300]}")
        if now - moved > STILL_SECONDS:
            raise UnavailableError(
                f"{edge} has {here:,} of {objects:,} objects and does not come forward", hint="is its capacity large enough?"
            )
        tick(f"of {objects:,} objects are there, {size(there)}", here)
        time.sleep(PAUSE_SECONDS)
    if as_json:
        print_json({"edge": edge, **asked, "objects": objects, "bytes": there, "seconds": round(now - started, 3)})
    else:
        print_text(f"{objects:,} objects, {size(there)}, are {'pinned ' if pin else ''}at {edge}")


def _asked(
    document: str, model: str, adapter: list[Path] | None, namespace: str | None, precision: str, *, chat: bool
) -> dict[str, Any]:
    """The order: a manifest by its address, which follows from the document's text."""
    address, tag = Digest.read(document), ModelTag.read(model)
    if address is not None and tag is not None:
        return {"model": str(tag), "manifest": str(address)}
    if tag is not None:
        raise UsageError(
            "the names of a document follow from the model itself, not from its tag", hint="name the checkpoint with --model"
        )
    quiet_libraries()
    from kvcdn.model.identity import identify_model  # noqa: PLC0415 - see kvcdn.cli

    known = identify_model(model, adapter or ())
    if address is not None:
        return {"model": str(known.identity.tag), "manifest": str(address)}
    from dataclasses import replace  # noqa: PLC0415

    from kvcdn.keyring import load_namespace  # noqa: PLC0415
    from kvcdn.keys import Chain, read_precisions  # noqa: PLC0415
    from kvcdn.model.tokens import encode_chat, encode_text  # noqa: PLC0415
    from kvcdn.origin.publishing.sources import read_document  # noqa: PLC0415

    read = read_document(document)
    if chat:
        prompt = encode_chat(known.tokenizer, read.messages(), answer_follows=False, tools=read.tools())
    else:
        prompt = encode_text(known.tokenizer, read.text)
    (chosen,) = read_precisions(precision)[:1]
    identity = replace(known.identity, precision=chosen)
    end = identity.layout.document_end(len(prompt.token_ids))
    if not end:
        raise UsageError("the document is too short to be published")
    names = Chain(identity, load_namespace(namespace), prompt.token_ids).prefix(end)
    return {"model": str(identity.tag), "manifest": str(names.manifest_address)}
