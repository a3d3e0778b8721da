"""`kvcdn jobs`: what a prefill service has been asked for, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvcdn.cli.options import AsJson, Token
from kvcdn.cli.output import counted, print_json, print_pairs, print_table, print_text
from kvcdn.cli.submit import ServiceClient
from kvcdn.cli.watches import Service
from kvcdn.errors import UsageError

app = typer.Typer(help="See, cancel and retry the jobs of a prefill service.", no_args_is_help=True, rich_markup_mode=None)

_HEADINGS = ["JOB", "STATE", "PRIORITY", "ATTEMPTS", "PROGRESS", "CREATED", "DOCUMENT", "REASON"]

_PAGE = 1000
"""Jobs that are asked for at once."""

Name = Annotated[str, typer.Argument(help="Id of the job.")]


@app.command("ls")
def list_jobs(
    service: Service,
    state: Annotated[str | None, typer.Option(help="Only queued, running, published, dead or cancelled ones.")] = None,
    after: Annotated[str, typer.Option(help="Go on behind this job, the last one of the page before.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Jobs at most.")] = 100,
    token: Token = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the jobs that the token may see, the oldest first."""
    page = ServiceClient(service, token).jobs(state, after, limit)
    if as_json:
        print_json({"service": service, **page})
        return
    print_table(_HEADINGS, [_row(job) for job in page["jobs"]])
    if page.get("next"):
        print_text(f"There are more: kvcdn jobs ls --after {page['next']}")


@app.command()
def show(name: Name, service: Service, token: Token = None, *, as_json: AsJson = False) -> None:
    """Show a job."""
    _show(ServiceClient(service, token).get(name), as_json=as_json)


@app.command()
def cancel(name: Name, service: Service, token: Token = None, *, as_json: AsJson = False) -> None:
    """Cancel a job; a running one ends at its next block, one that has ended stays as it is."""
    _show(ServiceClient(service, token).cancel(name), as_json=as_json)


@app.command()
def retry(
    service: Service,
    name: Annotated[str | None, typer.Argument(help="Id of the job.")] = None,
    token: Token = None,
    *,
    dead: Annotated[bool, typer.Option("--dead", help="Every dead job that the token may see.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have a dead job tried again, or all of them."""
    if (name is None) is not dead:
        raise UsageError("name one job, or say --dead")
    client = ServiceClient(service, token)
    if name is not None:
        _show(client.retry(name), as_json=as_json)
        return
    names = list(_dead(client))  # all of them first: what dies again meanwhile is not tried twice
    for each in names:
        client.retry(each)
    if as_json:
        print_json({"service": service, "retried": len(names)})
    else:
        print_text(f"{counted(len(names), 'job')} tried again")


def _dead(client: ServiceClient) -> Iterator[str]:
    after: str | None = ""
    while after is not None:
        page = client.jobs("dead", after, _PAGE)
        yield from (job["id"] for job in page["jobs"])
        after = page.get("next")


def _show(job: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    print_pairs([(word, _shown(value)) for word, value in job.items() if value not in (None, "", {}, [])])


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{word} {each}" for word, each in value.items() if each is not None)
    return str(value)


def _row(job: dict[str, Any]) -> list[str]:
    created = job.get("created")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(created)) if isinstance(created, int | float) else "?"
    progress = job.get("progress") or {}
    total = progress.get("tokens_total")
    done = f"{progress.get('tokens_done', 0):,} of {total:,}" if isinstance(total, int) else ""
    words = [str(job.get(word, "?")) for word in ("id", "state", "priority", "attempts")]
    return [*words, done, when, str(job.get("name") or ""), str(job.get("reason") or "")]
