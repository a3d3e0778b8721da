"""`kvcdn lint`: what in the front of an agent's prompts keeps them from being reused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcdn.cli.options import AsJson, Chat, Model, quiet_libraries
from kvcdn.cli.output import print_json, print_pairs, print_text
from kvcdn.errors import UsageError

if TYPE_CHECKING:
    from kvcdn.client.explaining.lint import Lint, Problem

_SECONDS_PER_HOUR = 3600


def lint(
    samples: Annotated[
        list[str], typer.Argument(help="Prompts of one agent: text files, .json or .jsonl of messages or requests, folders, -.")
    ],
    model: Model,
    tokens_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="Prefill speed in place of the one measured on this machine.")
    ] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of the machine that prefills, to tell what each problem costs.")
    ] = None,
    *,
    chat: Chat = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 where a problem is proved.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare several prompts of one agent: what changes in front of what they share, what it costs, how to mend it.

    One sample is looked through for what usually changes. The model is not loaded.
    """
    from kvcdn.origin.publishing.sources import list_documents, read_document  # noqa: PLC0415 - see kvcdn.cli

    documents = [read_document(name) for source in samples for name in list_documents(source)]
    quiet_libraries()
    from kvcdn.client.explaining.causes import Certainty  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.client.explaining.lint import lint_samples  # noqa: PLC0415
    from kvcdn.client.explaining.samples import read_samples  # noqa: PLC0415
    from kvcdn.client.explaining.views import Form, View  # noqa: PLC0415
    from kvcdn.keys import Namespace  # noqa: PLC0415
    from kvcdn.model.identity import identify_model, layout_dtype  # noqa: PLC0415
    from kvcdn.model.speed import prefill_speed_of  # noqa: PLC0415

    prompts = [sample for document in documents for sample in read_samples(document.name, document.text)]
    if len({isinstance(prompt.content, str) for prompt in prompts}) > 1:
        raise UsageError("some samples are text and some are chats", hint="lint prompts of one form at a time")
    known = identify_model(model)
    view = View(
        "", known.tokenizer, known.identity, Namespace.public(), Form.SYSTEM if chat else Form.TEXT, answer_follows=True
    )
    found = lint_samples(prompts, view)
    measured = prefill_speed_of(known.identity.tag, layout_dtype(known.identity))
    speed = tokens_per_second or (None if measured is None else 1 / measured.base)
    price = None if usd_per_hour is None else usd_per_hour / _SECONDS_PER_HOUR
    if as_json:
        print_json({**_to_json(found, known.identity.name, speed, price), "samples_given": len(prompts)})
    else:
        _print(found, len(prompts), known.identity.name, speed, price)
    if strict and any(problem.certainty is Certainty.PROVED for problem in found.problems):
        raise typer.Exit(1)


def _to_json(found: Lint, model: str, speed: float | None, price: float | None) -> dict[str, object]:
    return {
        "model": model,
        "samples": found.samples,
        "tokens": found.tokens,
        "tokens_shared": found.shared,
        "tokens_reusable": found.reusable,
        "block_tokens": found.block_tokens,
        "tokens_per_second": speed,
        "problems": [problem.to_json(speed and 1 / speed, price) for problem in found.problems],
    }


def _print(found: Lint, given: int, model: str, speed: float | None, price: float | None) -> None:
    from kvcdn.client.explaining.causes import Certainty  # noqa: PLC0415 - see kvcdn.cli

    of_more = f" of {given:,}, the first ones," if given > found.samples else ","
    share = "looked through alone" if found.samples == 1 else f"share their first {found.shared:,} tokens"
    print_pairs(
        [
            ("samples", f"{found.samples}{of_more} {share}; the first has {found.tokens:,} tokens for {model}"),
            ("reusable", f"{found.reusable:,} tokens in whole blocks of {found.block_tokens:,}"),
            ("prefill", f"{speed:,.0f} tokens/s" if speed else "speed not known yet; give --tokens-per-second"),
        ]
    )
    for problem in found.problems:
        print_text(f"\n{problem.cause}, {problem.certainty}, at token {problem.token:,}: {problem.detail}")
        costs = "costs" if problem.certainty is Certainty.PROVED else "would cost, if it changes,"
        print_text(f"  {costs} {_cost(problem, speed, price)}")
        print_text(f"  {problem.to_json(None, None)['advice']}")
    if not found.problems:
        print_text("\nnothing in front of what they share changes")


def _cost(problem: Problem, speed: float | None, price: float | None) -> str:
    told = problem.to_json(speed and 1 / speed, price)
    words = [f"{problem.behind:,} tokens behind it that cannot be reused"]
    if told["seconds_per_call"] is not None:
        words.append(f"{told['seconds_per_call']:,.2f} s a call")
    if told["usd_per_1000_calls"] is not None:
        words.append(f"{told['usd_per_1000_calls']:,.2f} USD in 1,000 calls")
    if problem.mended:
        words.append(f"with it mended, and all before it, {problem.mended:,} tokens are shared")
    return "; ".join(words)
