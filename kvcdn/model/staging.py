"""Staging: from the host to accelerators and back, through pinned memory, on streams beside the model's.

A copy that a stream is to make by itself needs pages that do not move: pinned memory, which torch's allocator keeps for the
next. Each thread that fills has two buffers of it, and waits for the older one's copies before it writes there anew: so what is
pinned is bounded by the threads and the largest layer. Who uses a layer tells its own stream to wait for the event behind the
layer's copies; no thread waits for a device.

On devices without streams, as here or on Apple's, the same calls copy at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray

_ALIGNMENT = 256
"""Bytes: what devices copy well from, and a multiple of every dtype's size."""

_BUFFERS = 2
"""A thread's: one is filled while the other is copied."""

_DTYPES = {name: getattr(torch, name) for name in ("uint8", "int8", "int16", "int64", "float32")}


class Uploads:
    """What is written into the tensors of one cache: on each cuda device in the order of one stream of its own.

    Memory is allocated, and used by the model, on the streams that are current to others: `follow` makes ours wait for the
    calling thread's, `join` the calling thread's for ours.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """`tensors` were allocated by this thread, and are all that will be written."""
        self._lock = threading.Lock()
        self._copied: dict[int, Any] = {}
        self._kept: dict[tuple[int, torch.device], tuple[Any, torch.Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for tensor in tensors:
            if tensor.device.type == "cuda":
                if tensor.device not in self._streams:
                    self._streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                # Nobody else gets this memory while copies to it are still to be made.
                tensor.record_stream(self._streams[tensor.device])
        self.follow()

    def lane(self, device: torch.device) -> AbstractContextManager[Any]:
        """In it this thread's operations, and what they allocate, belong to the stream for `device`."""
        return torch.cuda.stream(self._streams[device]) if device.type == "cuda" else nullcontext()

    def follow(self) -> None:
        """What is written from now on waits for what the calling thread has asked of the devices."""
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def join(self) -> None:
        """What the calling thread asks of the devices from now on waits for all that was written."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def mark(self, layer: int, device: torch.device) -> Any:
        """Notes that `layer` was written on `device`; returns the event behind it, None where it is done already."""
        if device.type != "cuda":
            return None
        # The last that is recorded must be the last that is noted: it is behind all the others.
        with self._lock:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._streams[device])
            self._copied[layer] = event
        return event

    def join_layer(self, layer: int, device: torch.device) -> None:
        """What the calling thread asks of `device` from now on waits for what was written to `layer` there."""
        event = self._copied.get(layer)
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)

    def kept(self, array: NDArray[Any], staging: Staging, device: torch.device) -> torch.Tensor:
        """`array` on `device`, copied there once for all; to be used in the lane."""
        found = self._kept.get((id(array), device))
        if found is None:
            found = self._kept[id(array), device] = (array, staging.upload(array, device))
        return found[1]


class Staging:
    """One thread's memory from which devices are filled. `begin` before each layer, and `end` with the event behind it."""

    def __init__(self) -> None:
        self.scratch = bytearray()
        """Working memory of decoding."""
        self._buffers = [_Buffer() for _ in range(_BUFFERS)]

    def begin(self) -> None:
        """Waits until the older buffer was copied, and fills that."""
        self._buffers.append(self._buffers.pop(0))
        self._buffers[-1].empty()

    def end(self, event: Any) -> None:
        """What was taken since `begin` is free again when `event` is over."""
        self._buffers[-1].event = event

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor on the host to be copied to `like`."""
        memory = self._buffers[-1].take(like.nbytes, pinned=like.device.type == "cuda")
        return memory.view(like.dtype).view(like.shape)

    def upload(self, array: NDArray[Any], device: torch.device) -> torch.Tensor:
        """`array` on `device`, in the lane that is current."""
        memory = self._buffers[-1].take(array.nbytes, pinned=device.type == "cuda")
        memory.numpy().view(array.dtype).reshape(array.shape)[...] = array
        host = memory.view(_DTYPES[array.dtype.name]).view(array.shape)
        made = torch.empty(host.shape, dtype=host.dtype, device=device)
        made.copy_(host, non_blocking=True)
        return made


class _Buffer:
    """Bytes on the host; pinned for devices that copy by themselves."""

    def __init__(self) -> None:
        self.event: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self) -> None:
        """Waits until what was taken was copied."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        self._used = 0

    def take(self, size: int, *, pinned: bool) -> torch.Tensor:
        """`size` bytes that nobody else has taken since it was emptied."""
        start, self._used = self._used, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._used > len(self._memory):
            # What was taken of the smaller one keeps it until it was copied: torch's allocator knows of copies.
            self._memory, start = torch.empty(2 * self._used, dtype=torch.uint8, pin_memory=pinned), 0
            self._used = -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._memory[start : start + size]


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors as they are on the CPU; from cuda into pinned memory, with one wait for all of them."""
    found, devices = [], set()
    for tensor in tensors:
        if tensor.device.type != "cuda":
            found.append(tensor.cpu())
            continue
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        found.append(host)
        devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return found
