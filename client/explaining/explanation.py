"""Explanation: what was found out about one prompt, as plain data with stable names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcdn.client.explaining.causes import ADVICE, Cause, Certainty
from kvcdn.client.explaining.divergence import Excerpt
from kvcdn.keys import ModelIdentity
from kvcdn.manifest import Manifest


@dataclass(frozen=True)
class Finding:
    """A cause. `token` is the first token it concerns, `reaches` how many are published once it is mended, where known."""

    cause: Cause
    certainty: Certainty
    detail: str
    token: int | None = None
    reaches: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "certainty": self.certainty,
            "token": self.token,
            "reaches": self.reaches,
            "detail": self.detail,
            "advice": ADVICE[self.cause],
        }


@dataclass(frozen=True)
class Departure:
    """Where the prompt leaves what is published: at `token`, or, unless `exact`, within the block that begins there."""

    token: int
    block: int
    exact: bool
    ours: Excerpt
    theirs: Excerpt | None = None

    def to_json(self) -> dict[str, Any]:
        theirs = self.theirs.to_json() if self.theirs else None
        return {
            "token": self.token,
            "block": self.block,
            "exact": self.exact,
            "prompt": self.ours.to_json(),
            "published": theirs,
        }


@dataclass
class Explanation:
    """Of `tokens` tokens, the first `published` can be loaded; `findings` say why no more, best first."""

    source: str
    identity: ModelIdentity
    namespace: str
    tokens: int
    published: int = 0
    covered: bool = False
    departure: Departure | None = None
    findings: list[Finding] = field(default_factory=list)
    document: Manifest | None = None
    complete: bool = True
    """False where the source was too slow to try every reading of the prompt."""

    @property
    def proved(self) -> bool:
        return any(finding.certainty is Certainty.PROVED for finding in self.findings)

    def add(
        self, cause: Cause, certainty: Certainty, detail: str, token: int | None = None, reaches: int | None = None
    ) -> None:
        """Adds a finding, unless its cause was found already."""
        if all(finding.cause is not cause for finding in self.findings):
            self.findings.append(Finding(cause, certainty, detail, token, reaches))

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`; field names are stable."""
        document = self.document
        return {
            "source": self.source,
            "model": self.identity.name,
            "model_tag": str(self.identity.tag),
            "namespace": self.namespace,
            "tokens": self.tokens,
            "tokens_published": self.published,
            "block_tokens": self.identity.layout.block_tokens,
            "covered": self.covered,
            "complete": self.complete,
            "leaves": self.departure.to_json() if self.departure else None,
            "document": {"address": str(document.address), "label": document.label, "tokens": document.tokens}
            if document
            else None,
            "causes": [finding.to_json() for finding in self.findings],
        }

    def sort(self) -> None:
        """Proved before likely, then by place; what concerns no token, such as a source that is down, is first."""
        self.findings.sort(
            key=lambda found: (
                found.certainty is not Certainty.PROVED,
                found.cause is Cause.NOT_PUBLISHED,
                -1 if found.token is None else found.token,
            )
        )
