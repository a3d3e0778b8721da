"""`kvcdn doctor`: try an origin, and say what to mend."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from kvcdn.cli.options import AsJson, Endpoint, Origin, open_origin
from kvcdn.cli.output import print_json, print_text
from kvcdn.errors import UnavailableError, UsageError


def doctor(
    origin: Origin = None,
    endpoint: Endpoint = None,
    role: Annotated[
        Literal["operator", "publisher", "edge"],
        typer.Option("--for", help="Whose needs: an edge's (read, list), a publisher's (write), an operator's (delete)."),
    ] = "operator",
    policy: Annotated[
        Literal["operator", "publisher", "edge", "lifecycle"] | None,
        typer.Option(help="Print the least that this role must be allowed as S3 policy, or the lifecycle rule; try nothing."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Try whether an origin can be reached, read, written, listed and deleted from, and whether it keeps what is there.

    Writes two small objects under v1/doctor/ and removes them. Ends with 5 where something is not as needed.
    """
    from kvcdn.origin.upkeep.doctor import Role, Status, examine  # noqa: PLC0415 - see kvcdn.cli

    if policy is not None:
        _print_policy(policy, origin, as_json=as_json)
        return
    store = open_origin(origin, endpoint)
    trials = examine(store, Role(role))
    fine = all(trial.status is not Status.FAILED for trial in trials)
    if as_json:
        print_json({"origin": store.url, "for": role, "ok": fine, "trials": [trial.to_json() for trial in trials]})
    else:
        width = max(len(trial.name) for trial in trials)
        words = {Status.OK: "ok", Status.FAILED: "NOT", Status.SKIPPED: "-"}
        for trial in trials:
            print_text(f"{words[trial.status]:<3}  {trial.name:<{width}}  {trial.detail}")
            if trial.status is Status.FAILED and trial.hint:
                print_text(f"     {'':<{width}}  to mend it: {trial.hint}")
    if not fine:
        raise typer.Exit(UnavailableError.exit_code)


def _print_policy(wanted: str, origin: str | None, *, as_json: bool) -> None:
    from kvcdn.origin.upkeep.doctor import Role  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.policy import lifecycle, policy  # noqa: PLC0415

    if origin is None:
        raise UsageError("a policy is for an S3 origin", hint="name it: --origin s3://bucket/prefix")
    document = lifecycle(origin) if wanted == "lifecycle" else policy(Role(wanted), origin)
    if as_json:
        print_json(document)
    else:
        print_text(json.dumps(document, indent=2))
