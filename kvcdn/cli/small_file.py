"""Small files that a command line names: settings, prices, tariffs, documents of ours."""

from __future__ import annotations

from pathlib import Path

from kvcdn.errors import NotFoundError, UsageError

MAX_BYTES = 1 << 20


def read_text(path: Path) -> str:
    """The text of a small file. Raises NotFoundError, or UsageError for one that is large or no text."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"{path} is larger than {MAX_BYTES:,} bytes")
        return data.decode("utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
