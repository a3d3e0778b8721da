"""Models in memory: loaded when a job needs one, and let go by least recent use within a budget."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from kvcdn.model.checkpoint import resolve_checkpoint
from kvcdn.model.load import LoadedModel, load_model


class Models:
    """The models of one worker, by the names that jobs give them. Used by one thread."""

    def __init__(
        self,
        budget: int,
        device: str,
        load: Callable[[str, str], LoadedModel] = load_model,
        size_of: Callable[[str], int] | None = None,
    ) -> None:
        """`budget` is in bytes of weights; a single model may be larger, and is then alone."""
        self._budget, self._device, self._load = budget, device, load
        self._size_of = size_of or checkpoint_bytes
        self._loaded: OrderedDict[str, tuple[LoadedModel, int]] = OrderedDict()

    @property
    def names(self) -> list[str]:
        """What is loaded, the least recently used first."""
        return list(self._loaded)

    def get(self, name: str) -> LoadedModel:
        """The model `name`, loaded now if need be, after others have left to make room. Raises a KvcdnError."""
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name][0]
        size = self._size_of(name)
        while self._loaded and size + sum(used for _, used in self._loaded.values()) > self._budget:
            self._loaded.popitem(last=False)
            gc.collect()  # modules refer to themselves in circles
        model = self._load(name, self._device)
        self._loaded[name] = model, size
        return model


def checkpoint_bytes(name: str) -> int:
    """Bytes of the weights in a model's files, which is what they take in memory. Raises a KvcdnError."""
    folder = Path(resolve_checkpoint(name).folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
