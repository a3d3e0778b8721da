"""Sizes: bytes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)")


def parse_size(value: Any) -> int:
    """Bytes of `200GB`, `1.5TiB` or a plain number: GB counts in thousands, GiB in 1,024s. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value).strip())
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{str(value)[:40]!r} is not a size; write a number and a unit, such as 200GB or 180GiB")
    return int(Decimal(match.group(1)) * unit)
