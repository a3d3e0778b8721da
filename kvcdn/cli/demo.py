"""`kvcdn demo`: the main job before one's eyes, with a real model, a real document and a real edge process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcdn.cli.options import AsJson, Model
from kvcdn.cli.output import link, note, print_json, print_table, print_text, size
from kvcdn.cli.rig import QUESTION, running_rig

if TYPE_CHECKING:
    from kvcdn.cli.rig import Rig

_ANSWER_TOKENS = 24


def demo(
    model: Model = "smollm2-135m",
    document: Annotated[Path | None, typer.Option(help="A text file; by default one found on this machine.")] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Length of the document.")] = 1500,
    *,
    as_json: AsJson = False,
) -> None:
    """Publish a document, serve it from an edge, and answer from its cache, beside a plain prefill."""
    from kvcdn.cli.publish import progress_bar  # noqa: PLC0415 - see kvcdn.cli

    note(f"Publishing the first {tokens:,} tokens of a document with {model} ...")
    with progress_bar("document", tokens) as progress, running_rig(model, document, tokens, progress) as rig:
        note("Asking: from the edge with its cache cold, then warm, then without kvcdn ...")
        result = _compare(rig)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _compare(rig: Rig) -> dict[str, Any]:
    from kvcdn.cli.stock import scheduled_answer, stock_answer  # noqa: PLC0415 - see kvcdn.cli

    answers = [rig.client.ask(rig.document, QUESTION, max_new_tokens=_ANSWER_TOKENS, do_sample=False) for _ in ("cold", "warm")]
    plain = stock_answer(rig.client, rig.document, QUESTION, _ANSWER_TOKENS)
    same = scheduled_answer(rig.client, rig.published.tokens, rig.document, QUESTION, _ANSWER_TOKENS)
    cold, warm = (answer.report for answer in answers)
    pairs = zip(answers[1].token_ids, plain.token_ids, strict=False)
    leading = next((index for index, (ours, its) in enumerate(pairs) if ours != its), len(answers[1].token_ids))
    return {
        "model": rig.published.model,
        "tokens": rig.published.tokens,
        "question": QUESTION,
        "answer": answers[1].text.strip(),
        "prefill_ttft_s": round(plain.first_token_s, 3),
        "edge_cold_ttft_s": round(cold.seconds["first_token"], 3),
        "edge_warm_ttft_s": round(warm.seconds["first_token"], 3),
        "raw_bytes": warm.bytes_raw,
        "wire_bytes": warm.bytes_fetched,
        "tokens_reused": [cold.tokens_reused, warm.tokens_reused],
        "answers_equal": all(answer.token_ids == same.token_ids for answer in answers),
        "answer_tokens": len(answers[1].token_ids),
        "tokens_equal_to_one_pass": leading,
        "prefill_tokens_per_second": rig.published.tokens_per_second,
    }


def _show(result: dict[str, Any]) -> None:
    rows = [
        ["prefill, without kvcdn", f"{result['prefill_ttft_s']:.2f} s", "1.0 x", "-"],
        *(
            [f"edge, {state}", f"{seconds:.2f} s", f"{result['prefill_ttft_s'] / seconds:.1f} x", size(result["wire_bytes"])]
            for state, seconds in (("cold", result["edge_cold_ttft_s"]), ("warm", result["edge_warm_ttft_s"]))
        ),
    ]
    print_table(["FIRST TOKEN", "AFTER", "FASTER", "ON THE WIRE"], rows)
    same = "equal, token for token," if result["answers_equal"] else "NOT equal"
    print_text(f"\nanswers        {same} to those after a local prefill on the publisher's schedule;")
    equal = f"{result['tokens_equal_to_one_pass']} of {result['answer_tokens']}"
    print_text(f"               the first {equal} tokens equal those after one pass over the text, which differs by rounding")
    print_text(f"answer         {result['answer']}")
    ratio = result["wire_bytes"] / result["raw_bytes"]
    print_text(f"KV cache       {size(result['raw_bytes'])} raw, {ratio:.2f} of it on the wire, lossless")
    break_even = result["wire_bytes"] / result["tokens"] * (result["prefill_tokens_per_second"] or 0)
    print_text(f"break-even     this machine gains on links above {link(break_even)}; below, it had better prefill")
