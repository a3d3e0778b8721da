"""Passphrases of signing keys: from a file or a variable that the environment names. Never from an argument.

Who can ask a person does so itself (`kvcdn.cli.passphrase`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvcdn.errors import UsageError

VARIABLE = "KVCDN_KEY_PASSPHRASE"
NEW_VARIABLE = "KVCDN_NEW_KEY_PASSPHRASE"
"""What a key is to be encrypted under from now on, where it has a passphrase already."""

_FILE_SUFFIX = "_FILE"

_MAX_BYTES = 4096
"""More is not a passphrase: a wrong path may be anything."""

Passphrase = Callable[[], bytes | None]
"""Gives a passphrase when it is needed, or None where there is none."""


def configured_passphrase(variable: str = VARIABLE) -> bytes | None:
    """What the file that `variable` + `_FILE` names holds, else what `variable` is; None without. Raises UsageError."""
    if path := os.environ.get(variable + _FILE_SUFFIX):
        return passphrase_in(Path(path))
    return os.environ[variable].encode("utf-8", "surrogateescape") if os.environ.get(variable) else None


def passphrase_from(path: Path | None) -> Passphrase:
    """What the file at `path` holds; without a path, as the environment says."""
    return configured_passphrase if path is None else lambda: passphrase_in(path)


def passphrase_in(path: Path) -> bytes:
    """The first line of the file at `path`, without its end. Raises UsageError."""
    try:
        with path.expanduser().open("rb") as file:
            found = file.read(_MAX_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read the passphrase file {path}: {error.strerror}") from None
    passphrase = found.partition(b"\n")[0].rstrip(b"\r")
    if not passphrase or len(passphrase) == _MAX_BYTES:
        raise UsageError(f"the passphrase file {path} holds no passphrase in its first line")
    return passphrase
