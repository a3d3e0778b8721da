"""Memory of caches: what is handed out, what comes back, and what is dropped."""

from __future__ import annotations

import gc
import os
import weakref

import torch

from kvcdn.layout import Layout
from kvcdn.model.layers import GROWTH_TOKENS, TokenMajorLayer
from kvcdn.model.memory import LEAST_BYTES, MemoryPool, empty_tensors

ROWS = (4096, 3, 64)
SHAPES = [(ROWS, torch.bfloat16), (ROWS, torch.bfloat16)]
SPEC = Layout.uniform_kv(1, 3, 64, "bfloat16").layers[0]
CPU = torch.device("cpu")


def test_tensors_are_writable_apart_and_aligned() -> None:
    """What is written to one tensor is not seen in its neighbour."""
    pool = MemoryPool()
    one, other, small = pool.tensors([(ROWS, torch.bfloat16), ((4099, 3, 7), torch.float32), ((1, 1, 1), torch.float16)])
    one.fill_(1)
    other.fill_(2)
    small.fill_(3)
    assert [bool((tensor == value).all()) for tensor, value in ((one, 1), (other, 2), (small, 3))] == [True] * 3
    assert [tuple(tensor.shape) for tensor in (one, other, small)] == [ROWS, (4099, 3, 7), (1, 1, 1)]
    assert [tensor.data_ptr() % 64 for tensor in (one, other, small)] == [0, 0, 0]


def test_memory_serves_the_next_once_every_view_is_gone() -> None:
    """A view of a view keeps a block; without any it is handed out again, also for a little less."""
    pool = MemoryPool()
    tensors = pool.tensors(SHAPES)
    place, view = tensors[0].data_ptr(), tensors[1][5:].transpose(0, 1)
    del tensors
    assert pool.kept_bytes == 0
    assert pool.tensors(SHAPES)[0].data_ptr() != place
    del view
    assert place in {pool.tensors(SHAPES)[0].data_ptr(), pool.tensors(SHAPES)[0].data_ptr()}
    shorter = [((4000, 3, 64), torch.bfloat16)] * 2
    held = pool.tensors(shorter), pool.tensors(shorter)
    assert place in {tensors[0].data_ptr() for tensors in held}
    assert pool.kept_bytes == 0


def test_a_block_is_never_lent_twice() -> None:
    """What is in use stays as it was written, whatever is taken and given back beside it."""
    pool = MemoryPool()
    held = []
    for number in range(8):
        tensors = pool.tensors(SHAPES)
        tensors[0].fill_(number)
        held.append(tensors)
        pool.tensors(SHAPES)[0].fill_(99)
    assert [int(tensors[0].max()) for tensors in held] == [int(tensors[0].min()) for tensors in held] == list(range(8))


def test_what_is_kept_is_bounded() -> None:
    """No more than `most` bytes, and no more than was in use at once, whatever sizes come."""
    size = sum(tensor.nbytes for tensor in MemoryPool().tensors(SHAPES))
    pool = MemoryPool(most=2 * size)
    held = [pool.tensors(SHAPES) for _ in range(4)]
    held.clear()
    assert pool.kept_bytes == 2 * size
    pool = MemoryPool()
    for tokens in range(4000, 80_000, 4000):
        pool.tensors([((tokens, 3, 64), torch.bfloat16)])
    assert pool.kept_bytes <= 80_000 * 3 * 64 * 2 * 65 // 64


def test_what_is_kept_too_long_is_dropped() -> None:
    """With no patience at all nothing is kept."""
    pool = MemoryPool(seconds=-1.0)
    for _ in range(3):
        pool.tensors(SHAPES)
        assert pool.kept_bytes == 0


def test_small_tensors_are_not_pooled() -> None:
    """The C library keeps their memory itself."""
    pool = MemoryPool()
    assert pool.tensors([((LEAST_BYTES // 4,), torch.uint8)] * 2)[0].nbytes == LEAST_BYTES // 4
    assert pool.kept_bytes == 0


def test_a_child_process_writes_to_its_own_memory() -> None:
    """After a fork neither sees what the other writes, in memory that is in use or kept."""
    pool = MemoryPool()
    (used,) = pool.tensors([(ROWS, torch.bfloat16)])
    used.fill_(1)
    pool.tensors([(ROWS, torch.bfloat16)])
    child = os.fork()
    if child == 0:
        # Without torch's threads, which a fork leaves behind.
        memoryview(used.view(torch.uint8).numpy()).cast("B")[:] = bytes(used.nbytes)
        memoryview(pool.tensors([(ROWS, torch.bfloat16)])[0].view(torch.uint8).numpy()).cast("B")[:] = bytes(used.nbytes)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((used == 1).all())


def test_layers_move_into_each_others_memory() -> None:
    """When decoding begins layers move one after the other: each takes the place that the one before has left."""
    pages = [TokenMajorLayer(SPEC, 4096 + GROWTH_TOKENS, 4096, CPU) for _ in range(4)]
    for layer in pages:
        for tensor in layer.storage:
            tensor.fill_(1)
    places = [layer.storage[0].data_ptr() for layer in pages]
    token = torch.full((1, 3, 1, 64), 2, dtype=torch.bfloat16)
    for _ in range(2):
        for layer in pages:
            layer.update(token, token)
    assert [layer.storage[0].data_ptr() for layer in pages[1:]] == places[:-1]
    assert [layer.keys.float().sum().item() for layer in pages] == [4096 * 3 * 64 + 2 * 2 * 3 * 64] * 4


def test_layers_give_their_memory_back() -> None:
    """Without the garbage collector's help."""
    gc.collect()
    gc.disable()
    try:
        layer = TokenMajorLayer(SPEC, 4096, 4096, CPU)
        gone = weakref.ref(layer)
        place = layer.storage[0].data_ptr()
        del layer
        assert gone() is None
        assert empty_tensors([(SPEC.tensors[0].shape(4096), torch.bfloat16)] * 2, CPU)[0].data_ptr() == place
    finally:
        gc.enable()
