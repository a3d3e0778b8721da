"""`kvcdn edge`: run a cache node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcdn.cli.output import print_pairs


def edge(
    config: Annotated[Path | None, typer.Option(help="Settings file; infra/edge.toml is a commented sample.")] = None,
    origin: Annotated[str | None, typer.Option(help="A folder, s3://bucket/prefix, or http(s)://another-edge.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="S3 endpoint, for a server that is not AWS.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of cached objects.")] = None,
    capacity: Annotated[str | None, typer.Option(help="Hard cap of the cache on disk, such as 200GB.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT or unix:/PATH to listen on.")] = None,
    trust: Annotated[Path | None, typer.Option(help="Trust list: cache only what these publishers signed.")] = None,
    *,
    check_config: Annotated[bool, typer.Option("--check-config", help="Say whether the settings will do, and end.")] = False,
) -> None:
    """Serve published caches over HTTP from a disk cache, filled from an origin. Options override the settings file."""
    from kvcdn.edge.serve import check, run  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.edge.settings import load_settings  # noqa: PLC0415

    given = {
        "origin": origin,
        "endpoint": endpoint,
        "cache_dir": cache,
        "capacity": capacity,
        "listen": listen,
        "trust_file": trust,
    }
    if check_config:
        settings = load_settings(config, given)
        check(settings)
        print_pairs([("settings", "good"), ("listens", f"{settings.scheme}://{settings.address}"), ("origin", settings.origin)])
    else:
        run(load_settings(config, given), lambda: load_settings(config, given))
