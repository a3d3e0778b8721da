"""Scale: what the tokens of a prompt weigh in bytes and take in seconds, by their position, for one model on one device."""

from __future__ import annotations

import math
from functools import cached_property

from kvcdn.economics.case import CONNECTIONS, RANGE_BYTES, STREAMED_BLOCKS, Speed
from kvcdn.economics.devices import UTILISATION, Device
from kvcdn.economics.models import Model
from kvcdn.errors import UnsupportedModelError
from kvcdn.layout import BLOCK_RAW_BYTES, MAX_BLOCK_TOKENS, MIN_BLOCK_TOKENS
from kvcdn.simulation.topology import Readers

RATE_TOKENS = 4096
"""Length at which a prefill rate is given."""


class Scale:
    """Bytes and seconds of one model. A simulated block has `block_tokens`; the objects that carry it may be several."""

    def __init__(self, model: Model, ratio: float, speed: Speed, block_tokens: int) -> None:
        """Raises UnsupportedModelError for a model with states: its KV is not proportional to its tokens."""
        if model.state_bytes:
            raise UnsupportedModelError(
                f"{model.name} keeps states beside its KV, which are not simulated",
                hint="a model of full attention, windows or MLA",
            )
        self.model, self.ratio, self.speed, self.block_tokens = model, ratio, speed, block_tokens
        self.raw_token_bytes = sum(group.layers * group.bytes_per_token for group in model.attention)
        """A published block has every row, also of layers with a window (ARCHITECTURE.md)."""
        self._passes: dict[tuple[int, int], float] = {}

    @property
    def token_bytes(self) -> float:
        """Stored bytes of a token."""
        return self.raw_token_bytes * self.ratio

    @property
    def block_bytes(self) -> float:
        """Stored bytes of a whole block."""
        return self.token_bytes * self.block_tokens

    @cached_property
    def object_tokens(self) -> int:
        """Tokens of one object, by FORMAT.md 2.4."""
        affordable = max(int(BLOCK_RAW_BYTES / self.raw_token_bytes), 1)
        return min(max(1 << (affordable.bit_length() - 1), MIN_BLOCK_TOKENS), MAX_BLOCK_TOKENS)

    def objects(self, tokens: int) -> int:
        """Objects that carry so many tokens."""
        return math.ceil(tokens / self.object_tokens)

    def turns(self, tokens: int) -> int:
        """Requests that one of a reader's connections makes one after the other to fetch so many tokens from an edge."""
        objects = self.objects(tokens)
        pieces = math.ceil(self.object_tokens * self.token_bytes / RANGE_BYTES)
        return math.ceil((objects if objects <= STREAMED_BLOCKS else objects * pieces) / CONNECTIONS)

    def pass_s(self, start: int, end: int) -> float:
        """A forward pass over the tokens from `start` to `end`, given those before."""
        key = (start, end)
        found = self._passes.get(key)
        if found is None:
            found = self._passes[key] = self.speed.seconds(self.model, start, end)
        return found


def speed_of(readers: Readers, model: Model, device: Device) -> Speed:
    """How fast the readers' devices compute, and what an hour of those that share one pass costs."""
    count = device.count_for(model)
    if readers.prefill_rate is not None:
        hour = device.usd_per_hour if readers.gpu_hour_usd is None else readers.gpu_hour_usd
        return Speed.of_rate(model, RATE_TOKENS, readers.prefill_rate, (hour * count, "given"))
    return Speed.of_device(device, count, readers.utilisation or UTILISATION, readers.gpu_hour_usd)
