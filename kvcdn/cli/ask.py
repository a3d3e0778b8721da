"""`kvcdn ask`: answer a question on a document from its published cache."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvcdn.cli.options import (
    Adapter,
    AsJson,
    Chat,
    Device,
    Edge,
    Endpoint,
    Local,
    MaxKl,
    Mode,
    Model,
    NamespaceName,
    Origin,
    Precisions,
    Token,
    TrustFile,
    UsageFile,
    open_source,
    quiet_libraries,
    trust_list,
)
from kvcdn.cli.output import note, print_json, print_text


def ask(
    document: Annotated[str, typer.Argument(help="The document: a text file, an http(s) URL, or - for standard input.")],
    question: Annotated[str, typer.Argument(help="What to ask about it.")],
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
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 64,
    mode: Annotated[
        Mode, typer.Option(help="Fetch the cache, compute it, both until they meet; auto: what is fastest.")
    ] = Mode.AUTO,
    deadline: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds to the first token, to be met if it can be.")
    ] = None,
    usage: UsageFile = None,
    *,
    progressive: Annotated[
        bool,
        typer.Option("--progressive", help="Begin on a lossy cache that is there sooner; bring the exact one here afterwards."),
    ] = False,
    local: Local = True,
    chat: Chat = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question on a document, from its published KV cache where there is one.

    Where there is none, or it cannot be trusted, the model reads the document itself, and the report says why.
    """
    from kvcdn.origin.publishing.sources import read_document  # noqa: PLC0415 - see kvcdn.cli

    read = read_document(document)
    content, tools = (read.messages(), read.tools()) if chat else (read.text, None)
    source, trusted = open_source(edge, origin, endpoint, token), trust_list(trust)
    quiet_libraries()
    from kvcdn.client import Client  # noqa: PLC0415 - see kvcdn.cli

    options: dict[str, Any] = {"trust": trusted, "namespace": namespace, "precision": precision, "max_kl": max_kl}
    options |= {"mode": mode.value, "deadline": deadline, "progressive": progressive}
    if usage is not None:
        options["usage"] = usage
    if not local:
        options["local_store"] = None
    with Client.load(model, source, device=device, adapters=adapter or (), **options) as client:
        prompt = client.question(content, question, tools=tools)
        answer = client.generate(prompt, max_new_tokens=max_tokens, do_sample=False)
        if client.refiner is not None:
            if not as_json:
                print_text(answer.text.strip())
            client.refiner.wait()
    if as_json:
        print_json({"answer": answer.text, "token_ids": list(answer.token_ids), "report": answer.report.to_json()})
    else:
        if not progressive:
            print_text(answer.text.strip())
        note(f"[{answer.report}]")
