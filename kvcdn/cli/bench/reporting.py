"""`kvcdn bench all` and `kvcdn bench report`: the whole suite, and the page that is made of its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcdn.cli.options import AsJson
from kvcdn.cli.output import note, print_json, print_table, print_text
from kvcdn.errors import KvcdnError, UnavailableError

Into = Annotated[Path, typer.Option("--results", help="Folder of the results, a JSON file each.")]


def run_all(
    names: Annotated[list[str] | None, typer.Argument(help="Benchmarks to run; all of them by default.")] = None,
    results: Into = Path("docs/benchmarks"),
    trace: Annotated[list[Path] | None, typer.Option(help="Traces for the eviction; a synthetic one by default.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model in place of each benchmark's own.")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: to see that all run, not to quote.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run every benchmark, or some, each as a process of its own, and keep their results."""
    from kvcdn.cli.bench.suite import benches, run_benches  # noqa: PLC0415 - see kvcdn.cli

    done = run_benches(benches(names or (), trace or ()), results, quick=quick, model=model, tell=note)
    if as_json:
        print_json(done)
    else:
        rows = [[name, f"{seconds:.0f} s"] for name, seconds in done["seconds"].items()]
        print_table(["BENCHMARK", "TOOK"], [*rows, *([name, f"FAILED: {why}"] for name, why in done["failed"].items())])
    if done["failed"]:
        raise KvcdnError(f"failed: {', '.join(done['failed'])}", hint="the others are kept; run these again by their names")


def report(
    page: Annotated[Path, typer.Argument(help="The page to write; plots go beside the results.")] = Path("docs/benchmarks.md"),
    results: Into = Path("docs/benchmarks"),
    readme: Annotated[
        list[Path] | None,
        typer.Option(help="Renew the marked part of this document as well, such as README.md; also several times."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Make the page of the kept results: tables, targets missed and met, plots. Nothing is measured."""
    from kvcdn.cli.bench.page import codecs, in_order, measured, render  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.cli.bench.plot import PLOTS  # noqa: PLC0415
    from kvcdn.cli.bench.suite import load_results  # noqa: PLC0415
    from kvcdn.cli.bench.targets import judge  # noqa: PLC0415
    from kvcdn.cli.small_file import read_text  # noqa: PLC0415
    from kvcdn.economics.report import fill  # noqa: PLC0415

    found = in_order(load_results(results))
    for name, draw in PLOTS.items():
        if name in found:
            draw(found[name], results / f"{name}.svg")
    try:
        page.write_text(render(found), "utf-8")
        for document in readme or ():
            parts = {"measured": lambda: measured(found), "codecs": lambda: codecs(found)}
            document.write_text(fill(read_text(document), parts), "utf-8")
    except OSError as error:
        raise UnavailableError(f"cannot write {page}: {error}") from None
    judged = [one for name, result in found.items() for one in judge(name, result)]
    missed = sum(not one.met for one in judged)
    if as_json:
        print_json({"page": str(page), "benchmarks": list(found), "targets": len(judged), "missed": missed})
        return
    print_text(f"{page}: {len(found)} benchmarks, {missed} of {len(judged)} targets missed")
