"""`kvcdn bench against`: kvcdn beside what a user would pick instead, on this machine, and what each makes of faults."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvcdn.cli.options import AsJson, Device, Measured, Model, Runs
from kvcdn.cli.output import note, print_json, print_table, print_text, size

COUNTED = ("trials", "wrong", "unnoticed", "recovered", "refused")

CHECKED = ("key", "integrity", "authenticity", "model", "confidentiality")


def against(
    tokens: Annotated[int, typer.Option(min=16, help="Length of the document.")] = 3774,
    model: Model = "smollm2-135m",
    document: Measured = None,
    runs: Runs = 5,
    precision: Annotated[str, typer.Option(help="Precisions to publish in, with commas.")] = "native,int8,tc-medium",
    fault_tokens: Annotated[int, typer.Option(min=0, help="Length of the documents that faults happen to; 0 for none.")] = 1024,
    device: Device = "cpu",
    *,
    as_json: AsJson = False,
) -> None:
    """Time to first token, bytes, CPU and wrong answers under faults: no cache, files by nginx and S3, LMCache, and kvcdn."""
    from kvcdn.cli.bench.against.measure import Extent, measure_against  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.keys import read_precisions  # noqa: PLC0415

    extent = Extent(tokens, runs, read_precisions(precision), fault_tokens)
    result = measure_against(model, document, extent, device, note)
    if as_json:
        print_json(result)
        return
    _print(result)


def _print(result: dict[str, Any]) -> None:
    print_table(
        ["WAY", "FIRST TOKEN", "FASTER", "ON THE WIRE", "AT REST", "CPU, READER", "CPU, SERVER"],
        [
            [
                row["way"],
                f"{row['ttft_s']:.3f} s",
                f"{row['speedup']:.1f} x",
                size(row["wire_bytes"]) if row["wire_bytes"] else "-",
                size(row["stored_bytes"]) if row["stored_bytes"] else "-",
                f"{row['reader_cpu_s']:.2f} s",
                f"{row['server_cpu_s']:.2f} s" if row["server_cpu_s"] is not None else "-",
            ]
            for row in result["rows"]
        ],
    )
    if "faults" in result:
        print_text("")
        print_table(
            ["WAY", "FAULT", *(name.upper() for name in COUNTED)],
            [[row["way"], row["fault"], *(str(row[name]) for name in COUNTED)] for row in result["faults"]["rows"]],
        )
    print_text("")
    print_table(
        ["WAY", *(name.upper() for name in CHECKED)],
        [[row["way"], *(row["checks"][name] for name in CHECKED)] for row in result["rows"]],
    )
    for one in result["not_run"]:
        print_text(f"not run: {one['way']}: {one['why']}" + (f"; {one['install']}" if one["install"] else ""))
