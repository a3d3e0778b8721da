"""`kvcdn verify`: is the published cache what it says it is."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcdn.cli.options import (
    Adapter,
    AsJson,
    Chat,
    Device,
    Edge,
    Endpoint,
    Model,
    NamespaceName,
    Origin,
    Token,
    TrustFile,
    open_source,
    quiet_libraries,
    trust_list,
)
from kvcdn.cli.output import note, print_json, print_pairs
from kvcdn.cli.publish import encode_document
from kvcdn.errors import IntegrityError, UnsupportedModelError


def verify(
    document: Annotated[str, typer.Argument(help="The document: a text file, an http(s) URL, or - for standard input.")],
    model: Model,
    adapter: Adapter = None,
    edge: Edge = None,
    origin: Origin = None,
    endpoint: Endpoint = None,
    token: Token = None,
    namespace: NamespaceName = None,
    trust: TrustFile = None,
    device: Device = "cpu",
    greedy: Annotated[int, typer.Option(min=1, help="Tokens over which to compare with a prefill in one pass.")] = 32,
    *,
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Load a document's published cache, recompute it, and compare.

    Shows that the bytes loaded are those published, whether a local prefill on the same schedule gives the same bits,
    and how far both are from one pass over the whole text, as any two kernels differ.
    """
    from kvcdn.origin.sources import read_document  # noqa: PLC0415 - see kvcdn.cli

    read = read_document(document)
    source, trusted = open_source(edge, origin, endpoint, token), trust_list(trust)
    quiet_libraries()
    from kvcdn.client import Client  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.client.verify import verify_prefix  # noqa: PLC0415

    with Client.load(model, source, device=device, adapters=adapter or (), trust=trusted, namespace=namespace) as client:
        if client.loaded is None:
            raise UnsupportedModelError(f"the cache of {model} is not supported, so nothing of it can be published")
        token_ids = encode_document(client.loaded, read, chat=chat)
        found = verify_prefix(client, token_ids, greedy, progress=note)
    if as_json:
        print_json({"document": read.name, "document_tokens": len(token_ids), **found.to_json()})
    else:
        stack = "the same stack" if found.same_stack else "another stack, so a rounding difference is expected"
        bits = "bit-identical" if found.bit_identical else f"differs, first in {found.first_difference}"
        apart = found.one_pass
        greedy_equal = f"{apart.greedy_equal} of {apart.greedy_total} greedy tokens equal"
        print_pairs(
            [
                ("published", f"{found.tokens:,} of the document's {len(token_ids):,} tokens, in {found.blocks} blocks"),
                ("loaded bytes", "are the bytes published" if found.loaded_equals_published else "are NOT the bytes published"),
                ("local prefill", f"{bits} on the publisher's schedule ({stack})"),
                (
                    "one pass",
                    f"max |dlogit| {apart.max_abs_dlogit:.4f}, KL {apart.kl_mean:.5f}, top-1 {apart.top1:.1%}, {greedy_equal}",
                ),
            ]
        )
    if not found.sound:
        raise IntegrityError(
            "the published cache is not what this model computes from this text on this very stack",
            hint="do not use it; ask its publisher, and remove it from the trust list",
        )
