"""What commands print for people."""

from __future__ import annotations

import pytest

from kvcdn.cli.output import counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "block", "0 blocks"),
        (1, "document", "1 document"),
        (2000, "document", "2,000 documents"),
        (1, "entry", "1 entry"),
        (3, "entry", "3 entries"),
        (2, "address", "2 addresses"),
    ],
)
def test_numbers_agree_with_their_nouns(count, noun, text):
    """One is singular, everything else is not."""
    assert text == counted(count, noun)
