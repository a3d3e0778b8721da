"""What commands show: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvcdn.errors import KvcdnError

TICK_SECONDS = 2.0
"""Between two lines of progress: often enough to see that it goes on, seldom enough to read."""


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own: with --json, all that goes to standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What moves a terminal's cursor, or turns the order of what is read: names, labels and reasons are anybody's words."""


def print_text(text: str) -> None:
    """A line of result for people."""
    sys.stdout.write(plain(text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line beside the result."""
    sys.stderr.write(plain(text) + "\n")
    sys.stderr.flush()


def plain(text: str) -> str:
    """`text` with what would command a terminal written out."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def ticking() -> Callable[[str, int], None]:
    """A progress for long runs: a line on standard error now and then, and none for what is quick."""
    last = time.monotonic()

    def tick(doing: str, count: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= TICK_SECONDS:
            last = now
            note(f"{count:,} {doing}")

    return tick


def print_error(error: KvcdnError, *, as_json: bool) -> None:
    """What happened, and what to do next; with --json also as the one object on standard output."""
    note(f"kvcdn: {error}" + (f"\n       {error.hint}" if error.hint else ""))
    if as_json:
        print_json({"error": str(error), "hint": error.hint, "kind": type(error).__name__, "exit_code": error.exit_code})


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and values, aligned."""
    rows = list(pairs)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print_text(f"{name:<{width}}  {value}")


def print_table(headings: list[str], rows: list[list[str]]) -> None:
    """A plain table: columns aligned, numbers as they come."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        print_text("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def counted(count: int, noun: str) -> str:
    """`1 document`, `2,000 documents`, `3 entries`, `2 addresses`."""
    if count == 1:
        return f"1 {noun}"
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun.endswith("s") else "s")
    return f"{count:,} {plural}"


def size(count: float) -> str:
    """Bytes in decimal units: `59.8 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:  # noqa: PLR2004 - the step between units
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def link(bytes_per_second: float) -> str:
    """A link speed in the unit links are sold by: `9.1 Mbit/s`."""
    megabits = bytes_per_second * 8 / 1e6
    return f"{megabits / 1000:.2f} Gbit/s" if megabits >= 1000 else f"{megabits:.1f} Mbit/s"  # noqa: PLR2004 - as in `size`
