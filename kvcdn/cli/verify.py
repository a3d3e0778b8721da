"""`kvcdn verify`: is the published cache what it says it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.options import (
    Adapter,
    AsJson,
    Chat,
    Device,
    Edge,
    Endpoint,
    MaxKl,
    Model,
    NamespaceName,
    Origin,
    Precisions,
    Token,
    TrustFile,
    open_source,
    quiet_libraries,
    trust_list,
)
from kvcdn.cli.output import counted, note, print_json, print_pairs, print_table, print_text
from kvcdn.cli.publish import encode_document
from kvcdn.errors import IntegrityError, UnsupportedModelError
from kvcdn.keys import PRECISION_NATIVE

if TYPE_CHECKING:
    from kvcdn.client.verify import Verification

if TYPE_CHECKING:
    from kvcdn.client.loading.report import Audited
    from kvcdn.client.verify import AuditedPrefix


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
    precision: Precisions = "native",
    max_kl: MaxKl = None,
    greedy: Annotated[int, typer.Option(min=1, help="Tokens over which to compare with a prefill in one pass.")] = 32,
    audit: Annotated[
        int | None, typer.Option(min=1, help="Recompute only so many random blocks, each from those before it.")
    ] = None,
    *,
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Load a document's published cache, recompute it, and compare.

    Shows that the bytes loaded are those published, whether a local prefill on the same schedule gives the same bits,
    and how far both are from one pass over the whole text, as any two kernels differ. With --audit, random blocks alone are
    recomputed, which takes their share of a prefill; a publisher whose block is not right is not trusted from then on.
    """
    from kvcdn.origin.publishing.sources import read_document  # noqa: PLC0415 - see kvcdn.cli

    read = read_document(document)
    source, trusted = open_source(edge, origin, endpoint, token), trust_list(trust)
    quiet_libraries()
    from kvcdn.client import Client  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.client.verify import audit_prefix, verify_prefix  # noqa: PLC0415

    options = {"trust": trusted, "namespace": namespace, "precision": precision, "max_kl": max_kl}
    with Client.load(model, source, device=device, adapters=adapter or (), **options) as client:
        if client.loaded is None:
            raise UnsupportedModelError(f"the cache of {model} is not supported, so nothing of it can be published")
        token_ids = encode_document(client.loaded, read, chat=chat)
        if audit is not None:
            _report_audit(audit_prefix(client, token_ids, audit, progress=note), read.name, len(token_ids), as_json=as_json)
            return
        found = verify_prefix(client, token_ids, greedy, progress=note)
    if as_json:
        print_json({"document": read.name, "document_tokens": len(token_ids), **found.to_json()})
    else:
        stack = "the same stack" if found.same_stack else "another stack, so a rounding difference is expected"
        bits = "bit-identical" if found.bit_identical else f"differs, first in {found.first_difference}"
        if found.beyond_rounding:
            bits = f"differs by more than rounding, first in {found.beyond_rounding}"
        exact = f"{bits} on the publisher's schedule ({stack})"
        apart = found.one_pass
        blocks = counted(found.blocks, "block")
        greedy_equal = f"{apart.greedy_equal} of {apart.greedy_total} greedy tokens equal"
        print_pairs(
            [
                ("published", f"{found.tokens:,} of the document's {len(token_ids):,} tokens, in {blocks}"),
                ("loaded bytes", "are the bytes published" if found.loaded_equals_published else "are NOT the bytes published"),
                *_certificates(found),
                ("local prefill", exact if found.precision == PRECISION_NATIVE else f"differs, as {found.precision} is lossy"),
                (
                    "one pass",
                    f"max |dlogit| {apart.max_abs_dlogit:.4f}, KL {apart.kl_mean:.5f}, top-1 {apart.top1:.1%}, {greedy_equal}",
                ),
            ]
        )
    if not found.sound:
        raise IntegrityError(
            "the published cache is not what this model computes from this text",
            hint="do not use it; ask its publisher, and remove it from the trust list",
        )


def _report_audit(found: AuditedPrefix, document: str, document_tokens: int, *, as_json: bool) -> None:
    """Shows an audit's outcome, and refuses publishers that failed it: this program loaded the model from its files."""
    from kvcdn.client.trust.audit import poison, reason_of  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.signing import PublicKey  # noqa: PLC0415

    if as_json:
        print_json({"document": document, "document_tokens": document_tokens, **found.to_json()})
    else:
        print_text(
            f"{found.tokens:,} of the document's {document_tokens:,} tokens are published, in {counted(found.blocks, 'block')};"
            f" {len(found.audited)} of them recomputed"
        )
        print_table(
            ["TOKENS", "BLOCK", "RESULT"],
            [[f"{one.start:,} to {one.start + one.tokens:,}", one.block[:16], _result(one)] for one in found.audited],
        )
    if found.culprit is not None:
        publisher, reason = found.culprit.publisher, reason_of(found.culprit)
        poison(PublicKey.from_text(publisher), reason)
        raise IntegrityError(
            f"{reason}; its publisher {publisher} is no longer trusted",
            hint=f"do not use it; if the mistake was yours: kvcdn trust forgive {publisher}",
        )


def _result(one: Audited) -> str:
    if one.identical:
        return "the same to the bit"
    return f"the same but for rounding, {one.worst:.2%}" if one.passed else "NOT what this model computes"


def _certificates(found: Verification) -> list[tuple[str, str]]:
    from kvcdn.certificate import Certificate  # noqa: PLC0415 - see kvcdn.cli

    named = (("certificate", found.certificate), ("measured here", found.measured))
    return [(name, str(Certificate(**numbers))) for name, numbers in named if numbers is not None]
