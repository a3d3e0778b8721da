"""`kvcdn publish`: prefill documents and store their KV caches at an origin."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvcdn.certificate import Certificate
from kvcdn.cli.options import (
    Adapter,
    AsJson,
    Chat,
    Endpoint,
    NamespaceName,
    OwnOrigin,
    Token,
    TrustFile,
    UsageFile,
    on_command_line,
    open_origin,
    quiet_libraries,
    signing_key,
    trust_list,
)
from kvcdn.cli.output import counted, link, note, print_error, print_json, print_pairs, size
from kvcdn.cli.wishes import refuse_ignored, unfulfilled
from kvcdn.errors import KvcdnError, UsageError

if TYPE_CHECKING:
    from kvcdn.keys import Namespace
    from kvcdn.model.load import LoadedModel
    from kvcdn.origin.publishing.publish import Publisher, PublishProgress, PublishResult
    from kvcdn.origin.publishing.settings import PublisherSettings
    from kvcdn.origin.publishing.sources import Document
    from kvcdn.origin.service.usage import OriginUsage
    from kvcdn.signing import SigningKey

_SECONDS_PER_DAY = 86400

_NAME_CHARACTERS = 200
"""Of a document's name, from its end, that a service is told."""


def publish(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="A text file, a folder of them, an http(s) URL, or - for standard input.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Checkpoint folder, hub id, or alias.")] = None,
    adapter: Adapter = None,
    origin: OwnOrigin = None,
    endpoint: Endpoint = None,
    config: Annotated[Path | None, typer.Option(help="Settings file; infra/origin.toml is a commented sample.")] = None,
    precision: Annotated[
        Literal["native", "int8", "int4", "tc-high", "tc-medium", "tc-low", "tc-least"] | None,
        typer.Option(help="How KV is kept: native, the default, is bit-exact; the others are measured on the document."),
    ] = None,
    min_quality: Annotated[
        float | None,
        typer.Option(min=0, help="Largest mean next-token KL in nats; where it is larger, a finer precision is published."),
    ] = None,
    progressive: Annotated[
        bool | None,
        typer.Option("--progressive/--no-progressive", help="With a lossy precision: publish what makes it exact as well."),
    ] = None,
    namespace: NamespaceName = None,
    label: Annotated[
        str | None, typer.Option(help="Public words to find the document by; else nothing of it is public.")
    ] = None,
    days: Annotated[int | None, typer.Option(min=1, help="Days after which the document may be forgotten.")] = None,
    key: Annotated[Path | None, typer.Option(help="Signing key (PEM) to use in place of yours.")] = None,
    trust: TrustFile = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs: cpu (the default), cuda, cuda:1.")] = None,
    service: Annotated[
        str | None,
        typer.Option(
            envvar="KVCDN_SERVICE", help="URL of a prefill service (kvcdn origin) that does it, in place of this machine."
        ),
    ] = None,
    token: Token = None,
    priority: Annotated[
        int | None, typer.Option(min=0, max=9, help="With --service: higher ones come first; 5 by default.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="With --service: hours of UTC in which it may begin, such as 22:00-06:00.")
    ] = None,
    usage: UsageFile = None,
    *,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="With --service: wait until it is published.")] = True,
    chat: Chat = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say size, time and break-even link speed; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prefill a document with a model and store its KV cache, signed and encrypted, at an origin.

    Options override the settings file and KVCDN_PUBLISHER_* variables.
    Where the same has been published already, nothing is done; an interrupted run is taken up where it ended.
    """
    refuse_ignored(on_command_line(ctx), service=service is not None)
    if service is not None:
        if progressive:
            raise UsageError("a prefill service publishes nothing progressively", hint="leave --service or --progressive out")
        wished = {"model": model, "precision": precision, "min_quality": min_quality, "namespace": namespace, "label": label}
        wished |= {"ttl": days and days * _SECONDS_PER_DAY, "priority": priority, "window": window}
        _submit(source, service, token, wished, chat=chat, wait=wait, as_json=as_json)
        return
    from kvcdn.keyring import load_namespace  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.publishing.settings import load_settings  # noqa: PLC0415
    from kvcdn.origin.publishing.sources import list_documents, read_document  # noqa: PLC0415
    from kvcdn.origin.service.usage import OriginUsage  # noqa: PLC0415

    options = {"model": model, "origin": origin, "endpoint": endpoint, "namespace": namespace, "label": label, "days": days}
    quality = {"precision": precision, "min_quality": min_quality, "progressive": progressive}
    files = {"adapters": adapter or None, "key_file": key, "trust_file": trust}
    settings = load_settings(config, {**options, **quality, **files, "device": device})
    sources = list_documents(source)
    # The first document is read before anything slow happens.
    first = _readable(sources[0], read_document, only=len(sources) == 1)
    space = load_namespace(settings.namespace)
    ledger = None if usage is None or dry_run else OriginUsage(usage)
    if dry_run:
        handle = _estimator(_load(settings), settings, space, chat=chat, as_json=as_json)
    else:
        publisher = _publisher(_load(settings), settings, space)
        expires = int(time.time()) + settings.days * _SECONDS_PER_DAY if settings.days else None
        handle = _publishing(publisher, settings, expires, ledger, chat=chat, as_json=as_json)
    failures = []
    with nullcontext() if ledger is None else ledger:
        for name in sources:
            try:
                handle(first if first and name == sources[0] else read_document(name))
            except KvcdnError as error:
                if ledger is not None:
                    ledger.failed()
                if len(sources) == 1:
                    raise
                print_error(error, as_json=as_json)
                failures.append(error)
    if failures:
        note(f"kvcdn: {len(failures)} of {len(sources)} documents were not published")
        raise typer.Exit(failures[0].exit_code)


def _submit(
    source: str, url: str, token: str | None, wished: Mapping[str, Any], *, chat: bool, wait: bool, as_json: bool
) -> None:
    """Hands documents to a prefill service. Each has a key, so that asking again after a lost answer adds no second job."""
    from kvcdn.cli.submit import ServiceClient, submit_all  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.publishing.sources import list_documents, read_document  # noqa: PLC0415

    common = {name: value for name, value in wished.items() if value is not None}
    requests = []
    failures: list[KvcdnError] = []
    names = list_documents(source)
    for name in names:
        try:
            contents = _contents(read_document(name), chat=chat)
        except KvcdnError as error:
            if len(names) == 1:
                raise
            print_error(error, as_json=as_json)
            failures.append(error)
            continue
        for line, content in enumerate(contents, 1):
            request = {"name": name[-_NAME_CHARACTERS:], "idempotency_key": secrets.token_hex(16), **common, **content}
            requests.append((f"{name}:{line}" if name.endswith(".jsonl") else name, request))
    submit_all(ServiceClient(url, token), requests, failures, wait=wait, as_json=as_json)


def _contents(document: Document, *, chat: bool) -> list[dict[str, Any]]:
    """What a document is to a service: a text, a chat, or, of a JSONL file, what each line says."""
    if chat:
        return [{"messages": document.messages(), "tools": document.tools()}]
    if not document.name.endswith(".jsonl"):
        return [{"text": document.text}]
    try:
        lines = [json.loads(line) for line in document.text.split("\n") if line.strip()]
    except (ValueError, RecursionError):
        raise UsageError(f"{document.name} is not JSON, a line each") from None
    if not all(isinstance(line, dict) for line in lines):
        raise UsageError(f"{document.name} has lines that are no objects", hint='a line is a job, such as {"text": "..."}')
    return lines


def _readable(name: str, read: Callable[[str], Document], *, only: bool) -> Document | None:
    """The document, or None where it is bad and others follow that may not be."""
    try:
        return read(name)
    except KvcdnError:
        if only:
            raise
        return None


def _load(settings: PublisherSettings) -> LoadedModel:
    quiet_libraries()
    from kvcdn.model.load import load_model  # noqa: PLC0415 - see kvcdn.cli

    return load_model(settings.model, settings.device, settings.adapters)


def _publisher(loaded: LoadedModel, settings: PublisherSettings, space: Namespace) -> Publisher:
    from kvcdn.origin.publishing.publish import Publisher  # noqa: PLC0415 - see kvcdn.cli

    signer = _signer(settings)
    store = open_origin(settings.origin, settings.endpoint)
    return Publisher(loaded, store, signer, namespace=space, trust=trust_list(settings.trust_file))


def _signer(settings: PublisherSettings) -> SigningKey:
    if settings.key_passphrase_file is None:
        return signing_key(settings.key_file)
    from kvcdn.keyring import load_signing_key, signing_key_path  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.passphrase import passphrase_from  # noqa: PLC0415

    return load_signing_key(settings.key_file or signing_key_path(), passphrase_from(settings.key_passphrase_file))


def _publishing(
    publisher: Publisher,
    settings: PublisherSettings,
    expires: int | None,
    ledger: OriginUsage | None,
    *,
    chat: bool,
    as_json: bool,
) -> Callable[[Document], None]:
    def handle(document: Document) -> None:
        token_ids = encode_document(publisher.loaded, document, chat=chat)
        with progress_bar(document.name, len(token_ids)) as progress:
            result = publisher.publish(
                token_ids,
                precision=settings.precision,
                progressive=settings.progressive,
                max_kl=settings.min_quality,
                label=settings.label,
                expires=expires,
                progress=progress,
            )
        if ledger is not None:
            ledger.published(result.to_json())
        if as_json:
            print_json({"document": document.name, **result.to_json()})
        else:
            _print_result(document.name, result, unfulfilled(publisher.store, result, settings))

    return handle


def _estimator(
    loaded: LoadedModel, settings: PublisherSettings, space: Namespace, *, chat: bool, as_json: bool
) -> Callable[[Document], None]:
    from kvcdn.origin.publishing.estimate import estimate_publish  # noqa: PLC0415 - see kvcdn.cli

    def handle(document: Document) -> None:
        estimate = estimate_publish(loaded, encode_document(loaded, document, chat=chat), space, settings.precision)
        if as_json:
            print_json({"document": document.name, **estimate.to_json()})
            return
        break_even = link(estimate.break_even_bytes_per_second)
        print_pairs(
            [
                ("document", document.name),
                ("tokens", f"{estimate.tokens:,} in {counted(estimate.blocks, 'block')}"),
                (
                    "size",
                    f"{size(estimate.raw_bytes)} raw, about {size(estimate.stored_bytes)} stored (ratio {estimate.ratio})",
                ),
                (
                    "time",
                    f"about {estimate.prefill_seconds:.1f} s at {estimate.tokens_per_second:,.0f} tokens/s on this machine",
                ),
                ("break-even", f"readers as fast as this machine gain on links above {break_even}; below, they prefill sooner"),
                ("measured on", f"the first {estimate.measured_tokens:,} tokens; nothing was written"),
            ]
        )

    return handle


def encode_document(loaded: LoadedModel, document: Document, *, chat: bool) -> tuple[int, ...]:
    """The token ids under which a document is published and asked about."""
    from kvcdn.model.tokens import encode_chat, encode_text  # noqa: PLC0415 - see kvcdn.cli

    if chat:
        return encode_chat(loaded.tokenizer, document.messages(), answer_follows=False, tools=document.tools()).token_ids
    return encode_text(loaded.tokenizer, document.text).token_ids


@contextmanager
def progress_bar(name: str, tokens: int) -> Iterator[Callable[[PublishProgress], None]]:
    """A progress bar on standard error, as the callable that a publisher reports to."""
    from rich.console import Console  # noqa: PLC0415 - see kvcdn.cli
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens, {task.fields[speed]}, {task.fields[stored]} stored"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name[-40:], total=tokens, speed="- tokens/s", stored="0 B")

        def show(progress: PublishProgress) -> None:
            computed = progress.tokens_done - progress.tokens_loaded
            speed = f"{computed / progress.seconds:,.0f} tokens/s" if computed and progress.seconds else "- tokens/s"
            bar.update(task, completed=progress.tokens_done, speed=speed, stored=size(progress.bytes_stored))

        yield show


def _refinement_pairs(result: PublishResult) -> list[tuple[str, str]]:
    rest = result.refinement
    if rest is None:
        return []
    whole = size(result.stored_bytes + rest["stored_bytes"])
    return [("refinement", f"{rest['precision']} {rest['address']}: {size(rest['stored_bytes'])} more, {whole} for exact KV")]


def _print_result(name: str, result: PublishResult, more: list[tuple[str, str]]) -> None:
    if result.status == "exists":
        did = "published already, nothing to do"
    elif result.status == "renewed":
        did = "published already, renewed to last longer"
    else:
        loaded = f", {result.tokens_loaded:,} tokens were there already" if result.tokens_loaded else ""
        did = f"{result.status} in {result.seconds:.1f} s at {result.tokens_per_second or 0:,.0f} tokens/s{loaded}"
    certificate = Certificate(**result.certificate) if result.certificate else None
    print_pairs(
        [
            ("document", f"{name}: {did}"),
            ("address", result.address),
            ("model", f"{result.model} ({result.fingerprint[:16]}), namespace {result.namespace}"),
            ("tokens", f"{result.tokens:,} in {counted(result.blocks, 'block')}, {result.blocks_uploaded} of them uploaded"),
            ("size", f"{size(result.raw_bytes)} raw, {size(result.stored_bytes)} stored (ratio {result.ratio:.3f})"),
            ("precision", result.precision if certificate is None else f"{result.precision}: {certificate}"),
            *_refinement_pairs(result),
            *more,
        ]
    )
