"""`kvcdn explain`: at which token a prompt leaves what is published, and why."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.options import (
    Adapter,
    AsJson,
    Chat,
    Edge,
    Endpoint,
    MaxKl,
    Model,
    NamespaceName,
    Origin,
    Precisions,
    Token,
    TrustFile,
    open_origin,
    open_source,
    quiet_libraries,
    trust_list,
)
from kvcdn.cli.output import print_json, print_pairs, print_text
from kvcdn.errors import CorruptError, KvcdnError, NotFoundError, UnavailableError, UsageError

if TYPE_CHECKING:
    from kvcdn.client.explaining.explanation import Explanation
    from kvcdn.client.explaining.samples import Content
    from kvcdn.client.explaining.views import View
    from kvcdn.client.sources.source import Source
    from kvcdn.keys import ModelIdentity
    from kvcdn.manifest import Manifest
    from kvcdn.store import BlobStore

_MANIFESTS = 2000
"""Documents of the model that an origin is asked for: each is a request."""

_MANIFESTS_OF_OTHERS = 50
"""Documents of each other model: enough to try the prompt's names under it."""

_MODELS = 32


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt: a text file, a .json file of chat messages, a URL, or -.")],
    model: Model,
    adapter: Adapter = None,
    against: Annotated[
        str | None,
        typer.Option(help="What should be the same: a text, messages, or the address or file of a published manifest."),
    ] = None,
    edge: Edge = None,
    origin: Origin = None,
    endpoint: Endpoint = None,
    token: Token = None,
    namespace: NamespaceName = None,
    trust: TrustFile = None,
    precision: Precisions = "native",
    max_kl: MaxKl = None,
    *,
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Say at which token a prompt leaves what is published, and why.

    Without adapters the model is not loaded. Ends with 3 where nothing is published of the prompt and no cause is proved, and
    with 5 where the source cannot be asked.
    """
    from kvcdn.origin.publishing.sources import read_document  # noqa: PLC0415 - see kvcdn.cli

    read = read_document(prompt)
    quiet_libraries()
    from kvcdn.client.explaining.explain import Explainer  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.client.explaining.samples import Conversation, read_sample  # noqa: PLC0415
    from kvcdn.client.explaining.shelf import Shelf  # noqa: PLC0415
    from kvcdn.client.explaining.surroundings import look_around  # noqa: PLC0415
    from kvcdn.client.explaining.views import Form, View  # noqa: PLC0415
    from kvcdn.client.trust.revoked import Revoked  # noqa: PLC0415
    from kvcdn.keyring import load_distrust, load_namespace  # noqa: PLC0415
    from kvcdn.keys import read_precisions  # noqa: PLC0415
    from kvcdn.model.identity import identify_model  # noqa: PLC0415

    content = read_sample(read.name, read.text).content
    source, space = open_source(edge, origin, endpoint, token), load_namespace(namespace)
    trusted = trust_list(trust).without(load_distrust())
    store = None if edge else open_origin(origin, endpoint)
    known = identify_model(model, adapter or ())
    form = Form.SYSTEM if chat else Form.TEXT
    view = View(content, known.tokenizer, known.identity, space, form, answer_follows=True)
    shelf = Shelf(source, _survey(store, known.identity))
    view = shelf.preferred(view, read_precisions(precision))
    reference: View | Manifest | None = None
    if against is not None:
        reference = _manifest(against, source, store, known.identity)
        if reference is None:
            # What a conversation is compared with was probably published as one; the other form is tried, too.
            form = Form.SYSTEM if chat or isinstance(content, Conversation) else Form.TEXT
            reference = replace(view, content=_document(against), form=form, answer_follows=False)
    around = look_around(view.identity, shelf, known.folder)
    revocations = Revoked(trusted, source).current()
    explanation = Explainer(shelf, trusted, around, max_kl, revocations).explain(view, reference)
    source.close()
    if as_json:
        print_json({"prompt": read.name, **explanation.to_json()})
    else:
        _print(read.name, explanation)
    code = _exit_code(explanation)
    if code:
        raise typer.Exit(code)


def _exit_code(explanation: Explanation) -> int:
    from kvcdn.client.explaining.causes import Cause  # noqa: PLC0415 - see kvcdn.cli

    if explanation.findings and explanation.findings[0].cause is Cause.UNAVAILABLE:
        return UnavailableError.exit_code
    return 0 if explanation.published or explanation.proved else NotFoundError.exit_code


def _survey(store: BlobStore | None, identity: ModelIdentity) -> list[Manifest]:
    """Documents of an origin that can be listed, ours first; nothing where it cannot be: then only names can be tried."""
    from kvcdn.origin.upkeep.catalog import manifest_infos, model_tags, read_manifests  # noqa: PLC0415 - see kvcdn.cli

    found: list[Manifest] = []
    if store is None:
        return found
    with suppress(KvcdnError):
        others = [tag for tag in islice(model_tags(store), _MODELS) if tag != identity.tag]
        for tag, most in [(identity.tag, _MANIFESTS), *((tag, _MANIFESTS_OF_OTHERS) for tag in others)]:
            listed = read_manifests(store, islice(manifest_infos(store, tag), most))
            found += [each.manifest for each in listed if each.manifest is not None]
    return found


def _manifest(target: str, source: Source, store: BlobStore | None, identity: ModelIdentity) -> Manifest | None:
    """The manifest that `target` names: a file that holds it, its address, or its key. None where it names a document."""
    from kvcdn.envelope import MANIFEST_MAGIC  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.manifest import MAX_MANIFEST_BYTES, open_manifest  # noqa: PLC0415

    path = Path(target).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        return open_manifest(data, target) if data.startswith(MANIFEST_MAGIC) else None
    if not re.fullmatch(r"[0-9a-f]{6,64}|v1/[0-9a-f]{32}/manifests/[0-9a-f]{64}", target):
        return None
    key = _manifest_key(target, store, identity)
    manifest = open_manifest(source.read(key, MAX_MANIFEST_BYTES), key)
    if not key.endswith(str(manifest.address)):
        raise CorruptError(f"{key}: another manifest lies under this name")
    return manifest


def _manifest_key(target: str, store: BlobStore | None, identity: ModelIdentity) -> str:
    from kvcdn.digest import Digest  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.keys import manifest_key  # noqa: PLC0415
    from kvcdn.origin.upkeep.catalog import find_manifest  # noqa: PLC0415

    if target.startswith("v1/"):
        return target
    if store is not None and not store.url.startswith(("http://", "https://")):
        return find_manifest(store, target).key
    address = Digest.read(target)
    if address is None:
        raise UsageError(f"an edge cannot look up the beginning of an address, {target!r}", hint="give all 64 digits of it")
    return manifest_key(identity.tag, address)


def _document(target: str) -> Content:
    from kvcdn.client.explaining.samples import read_sample  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.publishing.sources import read_document  # noqa: PLC0415

    read = read_document(target)
    return read_sample(read.name, read.text).content


def _print(name: str, found: Explanation) -> None:
    from kvcdn.client.explaining.difference import visible  # noqa: PLC0415 - see kvcdn.cli

    identity = found.identity
    published = f"the first {found.published:,} tokens" if found.published else "nothing"
    rows = [
        ("prompt", f"{name}: {found.tokens:,} tokens for {identity.name}, in blocks of {identity.layout.block_tokens:,}"),
        ("published", f"{published} at {found.source}, namespace {found.namespace}"),
    ]
    if found.document:
        label = f", {visible(found.document.label)}" if found.document.label else ""
        rows.append(("document", f"{found.document.address} of {found.document.tokens:,} tokens{label}"))
    if found.departure:
        where = found.departure
        place = f"at token {where.token:,}" if where.exact else f"at or behind token {where.token:,}"
        rows.append(("leaves it", f"{place}, in block {where.block}"))
        for title, text in (("  the prompt", where.ours.to_json()), ("  published", where.theirs and where.theirs.to_json())):
            if text:
                rows.append((title, f"{text['before']} >>> {text['after']}"))
    elif found.covered:
        rows.append(("covered", "every whole block of it is published"))
    print_pairs(rows)
    if not found.complete:
        print_text("\nthe source is slow: not every usual mistake was tried")
    for finding in found.findings:
        at = "" if finding.token is None else f" from token {finding.token:,}"
        then = "" if finding.reaches is None else f" (then {finding.reaches:,} tokens are published)"
        advice = finding.to_json()["advice"]
        print_text(f"\n{finding.cause}, {finding.certainty}{at}: {finding.detail}{then}\n  {advice}")
