"""A history: what was decided for one prompt, what came of it, and where the mind was changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcdn.client.planning.plan import Decision, Mode


@dataclass
class Switch:
    """A change of mode, seconds after the question."""

    at_s: float
    mode: Mode
    why: str


@dataclass
class History:
    """What was decided, and what came of it: `Report.plan`."""

    decision: Decision | None = None
    switches: list[Switch] = field(default_factory=list)
    fetched_blocks: int = 0
    computed_blocks: int = 0
    computed_s: float = 0.0
    passes: list[tuple[int, int]] = field(default_factory=list)
    """The token at which each pass computed here began, and the one before which it ended, in their order."""
    fetching_s: float = 0.0
    ready_s: float | None = None
    """Seconds from the question until the prefix was there; None where the model started before."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; `expected` are seconds by option at the start, None where unknown or without end."""
        if self.decision is None:
            return {}
        return {
            "mode": str(self.decision.mode),
            "why": self.decision.why,
            "expected": self.decision.expected.to_json(),
            "actual": {
                "ready": None if self.ready_s is None else round(self.ready_s, 4),
                "fetch": round(self.fetching_s, 4),
                "compute": round(self.computed_s, 4),
            },
            "switches": [{"at": round(one.at_s, 3), "mode": str(one.mode), "why": one.why} for one in self.switches],
            "blocks": {"fetched": self.fetched_blocks, "computed": self.computed_blocks},
            "passes": [list(one) for one in self.passes],
        }
