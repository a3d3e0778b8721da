"""The `kvcdn` program: its commands, its exit codes, and how errors are shown."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvcdn import __version__
from kvcdn.cli import (
    ask,
    cache,
    copy,
    demo,
    doctor,
    economics,
    edge,
    explain,
    inspect,
    jobs,
    journal,
    keygen,
    lint,
    listing,
    origin,
    pins,
    publish,
    purge,
    remove,
    revoke,
    rotate,
    show,
    simulate,
    token,
    trust,
    upkeep,
    usage,
    verify,
    warm,
    watches,
)
from kvcdn.cli.bench import commands as bench
from kvcdn.cli.output import print_error
from kvcdn.errors import KvcdnError, UsageError

_EXTRA_MODULES = frozenset(("torch", "transformers", "numpy", "blosc2", "safetensors", "huggingface_hub", "gguf", "jinja2"))

app = typer.Typer(
    name="kvcdn",
    help="A prefill CDN: compute a document's KV cache once, deliver it like a web asset, start decoding at once.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 not trusted or corrupt, 5 unavailable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(publish.publish)
app.command()(edge.edge)
app.command()(origin.origin)
app.command()(ask.ask)
app.command()(verify.verify)
app.command()(explain.explain)
app.command()(lint.lint)
app.command("inspect")(inspect.inspect_object)
app.command("ls")(listing.list_documents)
app.command()(show.show)
app.command("rm")(remove.remove)
app.command()(remove.retire)
app.command()(revoke.revoke)
app.command("rotate-key")(rotate.rotate_key)
app.command("cp")(copy.copy)
app.command()(warm.warm)
app.command()(pins.pins)
app.command()(pins.unpin)
app.command()(purge.purge)
app.command("gc")(upkeep.collect)
app.command("fsck")(upkeep.check)
app.command()(doctor.doctor)
app.command()(keygen.keygen)
app.command()(token.token)
app.command()(demo.demo)
app.command()(economics.economics)
app.add_typer(journal.app, name="journal")
app.command()(simulate.simulate)
app.command()(usage.usage)
app.add_typer(jobs.app, name="jobs")
app.add_typer(watches.app, name="watches")
app.add_typer(trust.app, name="trust")
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")


@app.callback()
def _options(
    *,
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"kvcdn {__version__}")
        raise typer.Exit


def run() -> None:
    """Runs the command line and ends the process; usage and interrupts are typer's, the other exit codes ours."""
    try:
        app()
    except (KvcdnError, ModuleNotFoundError) as raised:
        error = raised if isinstance(raised, KvcdnError) else _missing_extra(raised)
        print_error(error, as_json="--json" in sys.argv)
        sys.exit(error.exit_code)


def _missing_extra(error: ModuleNotFoundError) -> KvcdnError:
    """The bare install runs an edge; what loads models needs an extra. Raises `error` itself where that is not the cause."""
    if error.name is None or error.name.partition(".")[0] not in _EXTRA_MODULES:
        raise error
    return UsageError(
        f"this command needs the package {error.name}, which is not installed",
        hint="pip install 'kvcdn[origin]' to publish, 'kvcdn[client]' to ask and verify, 'kvcdn[demo]' for the demo",
    )
