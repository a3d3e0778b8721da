"""`python -m kvcdn.edge`: an edge as a process, told by KVCDN_EDGE_* and, with --config, by a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvcdn.edge.serve import run
from kvcdn.edge.settings import load_settings
from kvcdn.errors import KvcdnError


def main() -> int:
    """Runs the edge; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvcdn.edge", description=__doc__)
    parser.add_argument("--config", type=Path, help="a TOML file of settings")
    config: Path | None = parser.parse_args().config
    try:
        run(load_settings(config, {}), lambda: load_settings(config, {}))
    except KvcdnError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
