"""Lint: what is volatile in the front of an agent's prompts, found by comparing several of them, and what each piece costs.

Samples are compared with the first one, difference by difference: behind each, the texts are followed from where they meet
again. What is the same behind a difference is what the difference costs: it could be reused, but its names are others. A
difference behind which nothing of weight is the same is where the prompts' own part begins, which is as it should be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from kvcdn.client.explaining.causes import ADVICE, Cause, Certainty
from kvcdn.client.explaining.difference import common_length, first_difference
from kvcdn.client.explaining.samples import Conversation, Sample
from kvcdn.client.explaining.views import View
from kvcdn.client.explaining.volatile import find_volatile
from kvcdn.errors import UsageError
from kvcdn.model.tokens import Spelling

COMPARED = 100
"""Samples compared with the first."""

_DIFFERENCES = 64
"""Differences of two samples that are followed."""

_RUN_CHARACTERS = 24
"""Equal text between two differences below which it is chance: a few words that every text has."""

_STABLE_TOKENS = 16
"""Equal tokens behind a difference from which on it costs something."""

_SUSPECTS = 10

_CUE = re.compile(r"\b(?:today|now|current|currently|date|time|as of|it is|generated|updated)\b", re.IGNORECASE)
"""What stands before a date or time of the day; documents are full of others."""


@dataclass
class Problem:
    """Something volatile: it begins at token `token` of the first sample, and `behind` equal tokens follow it at least.

    With it mended, and all before it, prompts share `mended` tokens.
    """

    cause: Cause
    certainty: Certainty
    detail: str
    token: int
    behind: int = 0
    mended: int = 0
    samples: int = 1
    begin: int = field(default=0, repr=False)
    end: int = field(default=0, repr=False)

    def to_json(self, seconds_per_token: float | None, usd_per_second: float | None) -> dict[str, Any]:
        seconds = None if seconds_per_token is None else round(self.behind * seconds_per_token, 3)
        usd = None if seconds is None or usd_per_second is None else round(1000 * seconds * usd_per_second, 4)
        return {
            "cause": self.cause,
            "certainty": self.certainty,
            "token": self.token,
            "tokens_lost": self.behind,
            "tokens_shared_once_mended": self.mended,
            "seconds_per_call": seconds,
            "usd_per_1000_calls": usd,
            "samples": self.samples,
            "detail": self.detail,
            "advice": ADVICE[self.cause],
        }


@dataclass
class Lint:
    """What several prompts share: `shared` leading tokens, of which `reusable` are whole blocks; and the problems, in order."""

    samples: int
    tokens: int
    shared: int
    block_tokens: int
    problems: list[Problem]

    @property
    def reusable(self) -> int:
        return self.shared // self.block_tokens * self.block_tokens


_SPELLING = (Cause.LINE_ENDINGS, Cause.WHITESPACE, Cause.UNICODE)
"""What one function mends wherever it is."""


@dataclass(frozen=True)
class _Change:
    """A difference of two samples: characters [start, end) of the first, `at` the first different one; `run` equal follow."""

    cause: Cause
    detail: str
    at: int
    start: int
    end: int
    run: int


def lint_samples(samples: Sequence[Sample], view: View) -> Lint:
    """Compares the samples, each read as `view` reads its own content. Raises UsageError for one that cannot be tokenised."""
    views = [replace(view, content=sample.content) for sample in samples[: COMPARED + 1]]
    first = views[0].spell()
    if not first.token_ids:
        raise UsageError(f"{samples[0].name} is empty")
    shared, problems = len(first.token_ids), list[Problem]()
    own = len(first.text)
    for other in views[1:]:
        spelling = other.spell()
        shared = min(shared, common_length(first.token_ids, spelling.token_ids))
        found, begins = _compare(views[0], first, other, spelling)
        own = min(own, begins)
        for problem in found:
            _merge(problems, problem)
    problems.sort(key=lambda problem: problem.token)
    ends = [problem.token for problem in problems[1:]] + [first.token(own) if own < len(first.text) else len(first.token_ids)]
    for problem, end in zip(problems, ends if problems else (), strict=True):
        problem.mended = end
    suspects = _suspects(views[0], first, own, problems, alone=len(views) == 1)
    problems = [*_mended_at_once(problems), *suspects]
    return Lint(len(views), len(first.token_ids), shared, view.identity.layout.block_tokens, problems)


def _mended_at_once(problems: Sequence[Problem]) -> list[Problem]:
    """One problem for those in a row that are mended in one place, once: a text's line ends are all of one kind."""
    kept: list[Problem] = []
    for cause, group in groupby(problems, key=lambda problem: problem.cause):
        several = list(group)
        if cause in _SPELLING and len(several) > 1:
            first, last = several[0], several[-1]
            several = [replace(first, mended=last.mended, detail=f"{first.detail}; and {len(several) - 1} more of this kind")]
        kept += several
    return kept


def _compare(view: View, first: Spelling, other: View, spelling: Spelling) -> tuple[list[Problem], int]:
    """The problems that two samples show, and the character of the first at which the prompts' own part begins."""
    problems, tools = [], _tools_problem(view, first, other)
    if tools is not None and isinstance(other.content, Conversation) and isinstance(view.content, Conversation):
        spelling = replace(other, content=replace(other.content, tools=view.content.tools)).spell()
    changes = list(_changes(first.text, spelling.text))
    own = len(first.text)
    for index, change in enumerate(changes):
        token = first.token(change.at)
        behind = sum(
            first.token(each.end + each.run) - first.token(each.end) for each in changes[index:] if each.run >= _RUN_CHARACTERS
        )
        if behind < _STABLE_TOKENS:
            own = change.start
            break
        problems.append(
            Problem(
                change.cause,
                Certainty.PROVED,
                change.detail,
                token,
                behind,
                begin=first.token(change.start),
                end=first.token(change.end),
            )
        )
    if tools is not None:
        tools.behind = len(first.token_ids) - tools.end if not changes else first.token(own) - tools.end
        problems.insert(0, tools)
    return problems, own


def _changes(ours: str, theirs: str) -> Iterator[_Change]:
    """The differences of two texts in order. Of what is short between two of them, nothing is made: they are one."""
    here = there = 0
    pending: _Change | None = None
    for _ in range(_DIFFERENCES):
        difference = first_difference(ours[here:], theirs[there:])
        if difference is None:
            run = min(len(ours) - here, len(theirs) - there)
            if pending is not None:
                yield replace(pending, run=run)
            return
        start, end = here + difference.ours[0], here + difference.ours[1]
        change = _Change(difference.cause, difference.detail, here + difference.at, start, end, 0)
        if pending is not None and start - pending.end < _RUN_CHARACTERS and Cause.TEXT in (pending.cause, change.cause):
            change = replace(pending, end=end)
        elif pending is not None:
            yield replace(pending, run=start - pending.end)
        pending = change
        here, there = end, there + difference.theirs[1]
    if pending is not None:
        yield pending


def _tools_problem(view: View, first: Spelling, other: View) -> Problem | None:
    """Tools that are the same in another order, where the template shows them."""
    ours, theirs = view.content, other.content
    if not isinstance(ours, Conversation) or not isinstance(theirs, Conversation):
        return None
    if sorted(map(_canonical, ours.tools)) != sorted(map(_canonical, theirs.tools)) or repr(ours.tools) == repr(theirs.tools):
        return None
    swapped = replace(view, content=replace(ours, tools=theirs.tools)).spell()
    token = common_length(first.token_ids, swapped.token_ids)
    if token == len(first.token_ids):
        return None
    end = len(first.token_ids) - common_length(first.token_ids[::-1], swapped.token_ids[::-1])
    keys = ours.tools == theirs.tools
    cause, what = (Cause.KEY_ORDER, "the keys of the tools") if keys else (Cause.TOOL_ORDER, f"{len(ours.tools)} tools")
    return Problem(cause, Certainty.PROVED, f"{what} in another order", token, begin=token, end=max(end, token))


def _canonical(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_canonical(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(_canonical, value)) + "]" if isinstance(value, list) else repr(value)


def _merge(problems: list[Problem], new: Problem) -> None:
    """Adds a problem, or counts it where another pair of samples has shown it."""
    for known in problems:
        if known.cause is new.cause and known.token <= new.end and new.token <= known.end:
            known.token, known.end = min(known.token, new.token), max(known.end, new.end)
            known.behind = min(known.behind, new.behind)
            known.samples += 1
            return
    problems.append(new)


def _suspects(view: View, first: Spelling, front: int, problems: list[Problem], *, alone: bool) -> list[Problem]:
    """Volatile pieces that these samples have in common, or that a single sample has: they may change another day."""
    suspects = []
    template = str(view.tokenizer.chat_template or "")
    if isinstance(view.content, Conversation) and "strftime_now" in template:
        detail = "the model's chat template may write today's date into every prompt"
        suspects.append(Problem(Cause.TIMESTAMP, Certainty.LIKELY, detail, 0, len(first.token_ids)))
    for piece in find_volatile(first.text, 0, front):
        token = first.token(piece.start)
        cued = alone or (piece.cause is Cause.TIMESTAMP and _CUE.search(first.text[max(piece.start - 40, 0) : piece.start]))
        known = any(problem.begin <= token <= problem.end for problem in problems)
        if cued and not known:
            where = "" if alone else ", the same in all samples"
            behind = first.token(front) - first.token(piece.end) if front < len(first.text) else len(first.token_ids) - token
            suspects.append(Problem(piece.cause, Certainty.LIKELY, f"{piece.name}: {piece.text[:80]!r}{where}", token, behind))
        if len(suspects) >= _SUSPECTS:
            break
    return suspects
