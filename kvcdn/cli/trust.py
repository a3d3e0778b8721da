"""`kvcdn trust`: whose caches are accepted, whose are refused after a failed audit, and taking that back."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcdn.cli.options import AsJson
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
