"""`kvcdn origin`: run the prefill service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcdn.cli.output import print_pairs


def origin(
    config: Annotated[Path | None, typer.Option(help="Settings file; infra/service.toml is a commented sample.")] = None,
    origin: Annotated[
        str | None, typer.Option(envvar="KVCDN_ORIGIN", help="Where objects go: a folder or s3://bucket/prefix.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="S3 endpoint, for a server that is not AWS.")] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="A model that may be asked for; the first is the default.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to listen on.")] = None,
    queue: Annotated[Path | None, typer.Option(help="The queue, a SQLite file on a local disk.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Worker processes, or actors.")] = None,
    executor: Annotated[str | None, typer.Option(help="What runs them: processes or ray.")] = None,
    *,
    check_config: Annotated[bool, typer.Option("--check-config", help="Say whether the settings will do, and end.")] = False,
) -> None:
    """Take documents over HTTP, prefill them when it suits, and publish their KV caches. Options override the settings file."""
    from kvcdn.origin.service.serve import require_workers, run  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.origin.service.service_settings import load_settings  # noqa: PLC0415

    given = {
        "origin": origin,
        "endpoint": endpoint,
        "models": model or None,
        "listen": listen,
        "queue_file": queue,
        "workers": workers,
        "executor": executor,
    }
    settings = load_settings(config, given)
    if check_config:
        settings.guard()
        require_workers(settings)
        print_pairs([("settings", "good"), ("listens", str(settings.address)), ("models", ", ".join(settings.models))])
        return
    run(settings)
