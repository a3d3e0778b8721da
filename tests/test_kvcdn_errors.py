"""The error tree: its drawing, its exit codes, and that an error never shows a secret."""

from __future__ import annotations

import re

import pytest

from kvcdn import errors
from kvcdn.errors import KvcdnError

DRAWN = re.findall(r"(\w+Error)\s+(?:exit (\d))?", errors.__doc__ or "")


def tree(root: type[KvcdnError]) -> list[type[KvcdnError]]:
    """`root` and all below it."""
    return [root, *(found for child in root.__subclasses__() for found in tree(child))]


def test_drawing_is_the_tree() -> None:
    """The docstring draws every class, and no other."""
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, KvcdnError)}
    assert defined == {name for name, _ in DRAWN}


@pytest.mark.parametrize(("name", "code"), [(name, code) for name, code in DRAWN if code])
def test_exit_codes(name: str, code: str) -> None:
    """Each class ends the process with the code drawn beside it, and so do its subclasses."""
    found = {kind.exit_code for kind in tree(getattr(errors, name))} if name != "KvcdnError" else {KvcdnError.exit_code}
    assert {int(code)} == found


def test_hint_is_no_part_of_the_message() -> None:
    """The message says what happened; the next step is apart from it, and empty when there is none."""
    error = KvcdnError("it broke", hint="mend it")
    assert (str(error), error.hint, KvcdnError("it broke").hint) == ("it broke", "mend it", "")
