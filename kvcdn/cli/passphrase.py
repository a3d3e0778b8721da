"""Passphrases from whoever is at the terminal, where the environment names none."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from pathlib import Path

from kvcdn.errors import UsageError
from kvcdn.keyfile import check_passphrase
from kvcdn.passphrase import NEW_VARIABLE, VARIABLE, configured_passphrase


def passphrase_for(path: Path) -> Callable[[], bytes | None]:
    """Gives the passphrase of the key at `path`: the configured one, else what is typed; None where nobody can be asked."""

    def ask() -> bytes | None:
        configured = configured_passphrase()
        if configured is not None or not sys.stdin.isatty():
            return configured
        return _typed(f"Passphrase of {path}: ")

    return ask


def new_passphrase(path: Path, *, replaces: bool) -> bytes:
    """What to encrypt the key at `path` under: configured, or typed twice. Raises UsageError.

    Where it `replaces` another passphrase, that is what the first variable holds, and this the second one.
    """
    variable = NEW_VARIABLE if replaces else VARIABLE
    found = configured_passphrase(variable)
    if found is None:
        if not sys.stdin.isatty():
            raise UsageError("there is nobody to ask for a passphrase", hint=f"set {variable}_FILE to a file that holds it")
        found = _typed(f"New passphrase of {path}: ")
        check_passphrase(found)
        if found != _typed("The same again: "):
            raise UsageError("the two passphrases differ", hint="nothing was changed; try again")
    check_passphrase(found)
    return found


def _typed(prompt: str) -> bytes:
    return getpass.getpass(prompt, stream=sys.stderr).encode("utf-8", "surrogateescape")
