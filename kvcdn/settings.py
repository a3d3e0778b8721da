"""Settings sources: a service's TOML file and its variables, and how what is wrong with them is told.

What a service can be told is a model of its own (`kvcdn.edge.settings`, `kvcdn.origin.publishing.settings`); where settings
come from and how they are refused is the same for all, and here. Besides `keyring` and `passphrase` the only core module that
reads a file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvcdn.errors import UsageError

S = TypeVar("S")


@dataclass(frozen=True)
class SettingsSources:
    """Where one service's settings come from."""

    service: str
    """Its name in errors, such as `edge`."""
    env_prefix: str
    """What its variables begin with, such as `KVCDN_EDGE_`."""
    sample: str
    """The commented sample file that errors point to."""

    def load(
        self,
        kind: Callable[..., S],
        fields: Iterable[str],
        environment: Callable[[], Mapping[str, Any]],
        path: Path | None,
        overrides: Mapping[str, Any],
    ) -> S:
        """A `kind`, a pydantic model of `fields`, from, strongest first: `overrides`, `environment`, the file, the defaults.

        An override of None counts as not given. Raises UsageError that names the field and the place it came from.
        """
        from_file = self.read_file(path)
        given = {name: value for name, value in overrides.items() if value is not None}
        self.refuse_unknown_variables(fields)
        try:
            return kind(**{**from_file, **environment(), **given})
        except ValueError as error:
            errors = getattr(error, "errors", None)
            if errors is None:
                raise
            raise self.refusal(errors(include_input=False, include_url=False)) from None

    def read_file(self, path: Path | None) -> dict[str, Any]:
        """The settings in the file at `path`; none without a path. Raises UsageError."""
        if path is None:
            return {}
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            hint = f"{self.sample} is a sample to start from"
            raise UsageError(f"cannot read settings from {path}: {error}", hint=hint) from None

    def refuse_unknown_variables(self, fields: Iterable[str]) -> None:
        """Raises UsageError where the environment sets a variable of this service that is none of `fields`."""
        known = {self.env_prefix + name.upper() for name in fields}
        for name in sorted(os.environ):
            if name.startswith(self.env_prefix) and name not in known:
                hint = f"{self.sample} names every setting"
                raise UsageError(f"the environment sets {name}, which is no setting", hint=hint)

    def refusal(self, problems: Iterable[Mapping[str, Any]]) -> UsageError:
        """The error for what a pydantic ValidationError's `errors(include_input=False)` lists."""
        listed = "; ".join(_problem_lines(problems))
        return UsageError(f"{self.service} settings: {listed}", hint=f"{self.sample} explains every setting")


def _problem_lines(problems: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for problem in problems:
        field = ".".join(str(part) for part in problem["loc"])
        match problem["type"]:
            case "extra_forbidden":
                yield f"{field} is no setting"
            case "missing":
                yield f"{field} is missing"
            case _:
                yield f"{field}: {problem['msg'].removeprefix('Value error, ')}"
