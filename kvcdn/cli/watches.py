"""`kvcdn watches`: what a prefill service looks after by itself."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from kvcdn.cli.options import AsJson, Token
from kvcdn.cli.output import print_json, print_table, print_text
from kvcdn.cli.submit import ServiceClient

app = typer.Typer(help="See, add and remove what a prefill service watches.", no_args_is_help=True, rich_markup_mode=None)

_HEADINGS = ["NAME", "DOCUMENTS", "FAILING", "WAITING", "CURRENT", "OLD", "LAST LOOK", "FROM", "REASON"]

Service = Annotated[str, typer.Option(envvar="KVCDN_SERVICE", help="URL of the prefill service (kvcdn origin).")]


@app.command("ls")
def list_watches(service: Service, token: Token = None, *, as_json: AsJson = False) -> None:
    """List the watches of a service, and what each sees."""
    watches = ServiceClient(service, token).watches()
    if as_json:
        print_json({"service": service, "watches": watches})
        return
    print_table(_HEADINGS, [_row(watch) for watch in watches])
    for watch in watches:
        shown = watch.get("failures", [])
        for one in shown:
            print_text(f"{watch.get('name')}: {one.get('document')}: {one.get('reason')}")
        if shown and (more := watch.get("failing", 0) - len(shown)) > 0:
            print_text(f"{watch.get('name')}: {more:,} more fail")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="What it is remembered by.")],
    source: Annotated[str, typer.Argument(help="URL of a list of URLs, or of a sitemap.")],
    service: Service,
    kind: Annotated[str, typer.Option(help="list or sitemap. Folders are named in the service's settings.")] = "sitemap",
    every: Annotated[str, typer.Option(help="Between two looks, such as 15m.")] = "15m",
    grace: Annotated[str, typer.Option(help="How long an old version stays.")] = "24h",
    model: Annotated[str | None, typer.Option("--model", "-m", help="One of the service's models; else its first.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Private namespace of the service; else public.")] = None,
    label: Annotated[str, typer.Option(help="Public words that the manifests carry.")] = "",
    window: Annotated[str | None, typer.Option(help="Hours of UTC in which its jobs may begin, such as 22:00-06:00.")] = None,
    ttl: Annotated[int | None, typer.Option(min=1, help="Seconds from publication to expiry.")] = None,
    token: Token = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Have a service look after documents at URLs: what changes is published again, and old versions go."""
    watch = {"name": name, "kind": kind, "source": source, "every": every, "grace": grace, "label": label}
    more = {"model": model, "namespace": namespace, "window": window, "ttl": ttl}
    taken = ServiceClient(service, token).add_watch(watch | {word: value for word, value in more.items() if value is not None})
    if as_json:
        print_json({"service": service, **taken})
    else:
        print_text(f"{name} is watched by {service}")


@app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(help="A watch that was added.")],
    service: Service,
    token: Token = None,
    *,
    as_json: AsJson = False,
) -> None:
    """End a watch that was added. What it published stays; kvcdn rm removes that."""
    ServiceClient(service, token).remove_watch(name)
    if as_json:
        print_json({"service": service, "removed": name})
    else:
        print_text(f"{name} is watched no more by {service}")


def _row(watch: dict[str, Any]) -> list[str]:
    last = watch.get("last_look")
    looked = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(last)) if isinstance(last, int | float) else "never"
    counts = [str(watch.get(word, "?")) for word in ("documents", "failing", "submitted", "current", "old")]
    source = "added" if watch.get("added") else "settings"
    return [str(watch.get("name")), *counts, looked, source, str(watch.get("reason", ""))]
