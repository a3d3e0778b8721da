"""`kvcdn trust`: whose caches are accepted, whose are refused after a failed audit, and taking that back."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcdn.cli.inspect import SHORT, day
from kvcdn.cli.options import AsJson, Endpoint, Origin, TrustFile, open_origin, trust_list
from kvcdn.cli.output import note, print_json, print_pairs, print_table
from kvcdn.errors import NotFoundError

app = typer.Typer(help="See and mend whom you trust.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls")
def list_publishers(*, as_json: AsJson = False) -> None:
    """List the publishers on your trust list, and those refused because an audit of theirs failed."""
    from kvcdn.keyring import load_distrust, load_trust  # noqa: PLC0415 - see kvcdn.cli

    names, refused = load_trust().names, load_distrust()
    rows = [
        {"public_key": key.text, "name": names.get(key, ""), "listed": key in names, "refused": refused.get(key)}
        for key in [*names, *(key for key in refused if key not in names)]
    ]
    if as_json:
        print_json({"publishers": rows})
    elif not rows:
        note("nobody is trusted yet: kvcdn keygen --trust KEY adds a publisher")
    else:
        statuses = [f"refused, {row['refused']}" if row["refused"] else "trusted" for row in rows]
        cells = [[str(row["public_key"]), str(row["name"]), status] for row, status in zip(rows, statuses, strict=True)]
        print_table(["PUBLISHER", "NAME", "STATUS"], cells)


@app.command()
def follow(
    publisher: Annotated[str, typer.Argument(help="The public key on your trust list whose successor you want to trust.")],
    origin: Origin = None,
    endpoint: Endpoint = None,
    trust: TrustFile = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Trust the key that a publisher named as its next, by a statement of both keys at an origin (kvcdn rotate-key).

    Whoever stole the old key may have made the statement: compare the new key with what the publisher says elsewhere. The old
    key stays on the list, as what it signed stays good; take its line off when you need that no more.
    """
    from kvcdn.keyring import load_distrust, load_revocations, trust_path, trust_publisher  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.upkeep.rotation import follow_successors  # noqa: PLC0415
    from kvcdn.signing import PublicKey  # noqa: PLC0415

    key, store = PublicKey.from_text(publisher), open_origin(origin, endpoint)
    trusted = trust_list(trust).without(load_distrust())
    steps = follow_successors(store, key, trusted, load_revocations())
    if not steps:
        raise NotFoundError(f"{key.text} has named no successor at {store.url}", hint="it goes on counting as it does")
    names = {step.successor: f"{trusted.names[key]}, after {str(step.old)[:SHORT]}".lstrip(", ") for step in steps}
    added = [successor.text for successor, name in names.items() if trust_publisher(successor, name, trust)]
    last, file = steps[-1].successor.text, str(trust or trust_path())
    if as_json:
        found = {"followed": key.text, "trusted": last, "added": added, "file": file}
        print_json({**found, "steps": [{"old": step.old.text, "successor": step.successor.text} for step in steps]})
        return
    for step in steps:
        print_pairs([("since " + day(step.created), f"{step.old.text} is followed by {step.successor.text}")])
    print_pairs([("trusted", last + ("" if added else ", as before")), ("file", file)])


@app.command()
def forgive(
    publisher: Annotated[str, typer.Argument(help="The public key of a publisher whose audit failed.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Accept a publisher's caches again after a failed audit; only if it also is on the trust list."""
    from kvcdn.keyring import forgive_publisher  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.signing import PublicKey  # noqa: PLC0415

    key = PublicKey.from_text(publisher)
    if not forgive_publisher(key):
        raise NotFoundError(f"{key.text} is not refused", hint="kvcdn trust ls shows who is")
    result = {"forgiven": key.text}
    if as_json:
        print_json(result)
    else:
        print_pairs(list(result.items()))
