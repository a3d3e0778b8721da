"""`kvcdn show`: one published document at an origin, and how it stands."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.inspect import day, describe_manifest, shown
from kvcdn.cli.options import (
    Adapter,
    AsJson,
    Chat,
    Endpoint,
    NamespaceName,
    Origin,
    TrustFile,
    open_origin,
    quiet_libraries,
    trust_list,
)
from kvcdn.cli.output import note, print_json, print_pairs, ticking
from kvcdn.errors import CorruptError, NotFoundError, UsageError

if TYPE_CHECKING:
    from kvcdn.origin.upkeep.standing import Standing

_SECONDS_PER_DAY = 86400


def show(
    target: Annotated[
        str,
        typer.Argument(help="A document's address, the beginning of it, or its object key; with --model, the document itself."),
    ],
    origin: Origin = None,
    endpoint: Endpoint = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model for which the document TARGET (a file, a URL or -) was published."),
    ] = None,
    adapter: Adapter = None,
    namespace: NamespaceName = None,
    precision: Annotated[str, typer.Option(help="The precision in which it was published; goes with --model.")] = "native",
    trust: TrustFile = None,
    *,
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Show one published document: what its manifest says, whether its blocks are there, has it expired, is it revoked.

    Blocks are looked for and not read; kvcdn fsck reads them. Without adapters no model is loaded.
    """
    from kvcdn.keyring import load_distrust, load_revocations  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.catalog import find_manifest, read_manifest  # noqa: PLC0415
    from kvcdn.origin.upkeep.standing import look_up_standing  # noqa: PLC0415

    if model is None and (chat or adapter or namespace or precision != "native"):
        raise UsageError("an address says its precision and namespace itself", hint="name the document, and its --model")
    store, trusted = open_origin(origin, endpoint), trust_list(trust).without(load_distrust())
    text = _object_key(target, model, adapter or [], namespace, precision, chat=chat) if model else target
    try:
        info = find_manifest(store, text)
    except NotFoundError:
        if model is None:
            raise
        where = f"for {model}, in {precision}, namespace {namespace or 'public'}" + (", as a chat" if chat else "")
        hint = "kvcdn ls shows what is; was it another precision, namespace or text?"
        raise NotFoundError(f"{target} is not published at {store.url} {where}", hint=hint) from None
    listed = read_manifest(store, info)
    if listed is None:
        raise NotFoundError(f"{text} has just been removed from {store.url}")
    if listed.manifest is None:
        raise listed.problem or CorruptError(f"{listed.info.key}: cannot be read")
    now = time.time()
    standing = look_up_standing(
        store, listed.manifest, trusted, now=now, known=load_revocations().of(trusted), progress=ticking()
    )
    described = {"object": listed.info.key, **describe_manifest(listed.manifest, trusted)}
    described["manifest_bytes"] = len(listed.data)
    if as_json:
        print_json({"origin": store.url, **described, **standing.to_json()})
        return
    pairs = [(key.replace("_", " "), shown(key, value)) for key, value in described.items() if key != "expires"]
    print_pairs([*pairs, ("expires", _expiry(listed.manifest.expires, now)), *_standing_pairs(standing)])
    for signer in standing.unreadable:
        note(f"kvcdn: the revocations of {signer} at {store.url} cannot be read")


def _object_key(source: str, model: str, adapters: list[Path], namespace: str | None, precision: str, *, chat: bool) -> str:
    """The object key under which the document at `source` is published for `model`."""
    from kvcdn.keyring import load_namespace  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.keys import PRECISIONS, PrefixNames, manifest_key  # noqa: PLC0415
    from kvcdn.origin.publishing.sources import read_document  # noqa: PLC0415

    if precision not in PRECISIONS:
        raise UsageError(f"{precision[:40]!r} is no precision", hint=f"one of {', '.join(PRECISIONS)}")
    document, space = read_document(source), load_namespace(namespace)
    quiet_libraries()
    from kvcdn.model.identity import identify_model  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.model.tokens import encode_chat, encode_text  # noqa: PLC0415

    known = identify_model(model, adapters)
    if chat:
        prompt = encode_chat(known.tokenizer, document.messages(), answer_follows=False, tools=document.tools())
    else:
        prompt = encode_text(known.tokenizer, document.text)
    end = known.identity.layout.document_end(len(prompt.token_ids))
    if not end:
        raise UsageError(f"{document.name} is too short to be published for {known.identity.name}")
    names = PrefixNames.of(replace(known.identity, precision=precision), space, prompt.token_ids[:end])
    return manifest_key(known.identity.tag, names.manifest_address)


def _expiry(expires: int | None, now: float) -> str:
    if expires is None:
        return "never"
    if expires <= now:
        return f"{day(expires)}: it has expired, and kvcdn gc removes it"
    return f"{day(expires)}, in {(expires - now) / _SECONDS_PER_DAY:,.1f} days"


def _standing_pairs(standing: Standing) -> list[tuple[str, str]]:
    if standing.complete:
        there = f"all {standing.blocks_there:,} of the right size (their bytes were not read)"
    else:
        there = (
            f"{standing.blocks_there:,} there, {len(standing.missing):,} missing, {len(standing.resized):,} of another size:"
            " publish the document again"
        )
    revoked = [
        f"by {each.signer.text}{'' if each.trusted else ' (not on your trust list)'}: its {each.what}"
        for each in standing.revoked
    ]
    return [("blocks there", there), ("revoked", "; ".join(revoked) or "no")]
