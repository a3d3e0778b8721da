"""Weights in memory: whether a model still is what it was, without reading all of it."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from kvcdn.digest import Digest

_SAMPLES = 16
"""Values taken of each tensor, evenly spaced: whoever changes a whole tensor changes some, and a look costs milliseconds."""


def sample_weights(model: PreTrainedModel) -> Digest:
    """A digest of values from all over `model`'s weights and buffers (rope is one) as they are in memory now.

    A checkpoint's files are fingerprinted once; what is done to the model afterwards is not in them. torch counts writes to a
    tensor, but not those through `.data`, as which adapters are merged.
    """
    hasher = blake3()
    samples: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    with torch.inference_mode():
        for tensor in chain(model.parameters(), model.buffers()):
            hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            if tensor.numel() and tensor.device.type != "meta":
                flat = tensor.detach().reshape(-1)
                samples[tensor.device, tensor.dtype].append(flat[:: max(flat.shape[0] // _SAMPLES, 1)])
        for taken in samples.values():
            # One copy from the device for all tensors of a dtype.
            hasher.update(bytes(torch.cat(taken).cpu().view(torch.uint8).numpy()))
    return Digest(hasher.digest())
