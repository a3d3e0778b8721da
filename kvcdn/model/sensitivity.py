"""Sensitivity: how much each row of a KV matters for what the model expects next, as gradients along a document's own tail.

To second order the divergence that an error of a row causes is half its square through the Fisher matrix: the mean outer
product of the gradients of log-likelihoods of tokens drawn from the model's own expectations. One backward pass over the
tail gives the gradients of all rows of all layers at once, whatever the model's architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from kvcdn.errors import UnsupportedModelError
from kvcdn.model.cache import build_cache, cache_argument, make_layer
from kvcdn.model.load import LoadedModel
from kvcdn.model.place import device_of, layer_devices
from kvcdn.model.quality import Kv

PROBE_TOKENS = 512
"""Tokens of the tail along which gradients are taken: more see more of what is read, and cost a backward pass each."""

SAMPLES = 2
"""Draws of the expected tokens: each is one forward and one backward pass over the tail."""

_LEAST_READERS = 16
"""Rows near the end are read by few tokens of the tail; with fewer than this their gradients would be mostly chance."""

Gradients = list[tuple[torch.Tensor, ...]]
"""For each layer, of each tensor, [tokens, heads, dim] float32 on the CPU."""


def probe_tokens(total: int) -> int:
    """The tokens of the probe of a document of `total` tokens."""
    return max(min(PROBE_TOKENS, total // 2), 1)


def row_gradients(loaded: LoadedModel, token_ids: Sequence[int], kv: Kv, *, samples: int = SAMPLES) -> Iterator[Gradients]:
    """Gradients with respect to the rows of `kv`, the exact KV of `token_ids` or more, one set for each of `samples` draws.

    Each row's are scaled as if the whole probe had read it. Raises UnsupportedModelError where a layer cannot be probed.
    """
    total = len(token_ids)
    probe = probe_tokens(total)
    head = total - probe
    readers = torch.full((total,), float(probe))
    readers[head:] = torch.arange(probe, 0, -1).clamp_min(_LEAST_READERS)
    scale = (probe / readers).sqrt()[:, None, None]
    for sample in range(samples):
        recorded = _Recorder(loaded, kv, head)
        loss = _drawn_loss(loaded, token_ids[head:], recorded, sample)
        flat = [tensor for tensors in recorded.tensors for tensor in tensors]
        found = iter(torch.autograd.grad(loss, flat, allow_unused=True))
        gradients = []
        for tensors, first in zip(recorded.tensors, recorded.first, strict=True):
            rows = []
            for tensor in tensors:
                full = torch.zeros(total, tensor.shape[1], tensor.shape[3])
                gradient = next(found)
                if gradient is not None:
                    full[first:] = gradient[0].transpose(0, 1).float().cpu()
                rows.append(full * scale)
            gradients.append(tuple(rows))
        yield gradients


def _drawn_loss(loaded: LoadedModel, token_ids: Sequence[int], recorded: _Recorder, seed: int) -> torch.Tensor:
    """Minus the log-likelihood of tokens drawn from what the model expects at each of `token_ids`."""
    model = loaded.model
    with torch.inference_mode(mode=False), torch.enable_grad():
        ids = torch.tensor([list(token_ids)], dtype=torch.long, device=device_of(model))
        logits = model(input_ids=ids, use_cache=True, **{cache_argument(model.forward): recorded.cache}).logits[0].float()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
        return cross_entropy(logits, drawn.to(logits.device), reduction="sum")


class _Recorder:
    """A cache that holds the first `head` rows of a KV, and keeps the very tensors that attention reads of each layer."""

    def __init__(self, loaded: LoadedModel, kv: Kv, head: int) -> None:
        specs = loaded.identity.layout.layers
        self.tensors: list[tuple[torch.Tensor, ...]] = [() for _ in specs]
        self.first = [0] * len(specs)
        layers = []
        devices = layer_devices(loaded.model, loaded.identity.layout)
        for index, (spec, device, tensors) in enumerate(zip(specs, devices, kv, strict=True)):
            if spec.kind not in ("kv", "window", "none"):
                raise UnsupportedModelError(f"the sensitivity of layers of the kind {spec.kind!r} cannot be measured")
            layer: Any = make_layer(spec, head + 1, head, device)
            for place, tensor in zip(layer.rows(0, head), tensors, strict=True):
                place.copy_(tensor[:head])
            if tensors:
                self.first[index] = head - layer.keys.shape[-2]
                layer.update = self._recording(index, layer)
            layers.append(layer)
        self.cache = build_cache(loaded.model, layers)

    def _recording(self, index: int, layer: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        def update(key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            old = (layer.keys.detach(), layer.values.detach())
            whole = [torch.cat(pair, dim=-2) for pair in zip(old, (key, value), strict=True)]
            for tensor in whole:
                tensor.requires_grad_()
            self.tensors[index] = tuple(whole)
            return whole[0], whole[1]

        return update
