"""LMCache as a peer: a process in an environment of its own that stores and retrieves the same KV with LMCache's engine.

Run as a program by `kvcdn.cli.bench.against.lmcache`, with the interpreter of that environment; kvcdn is not installed there,
so that nothing of it is imported. Orders come as JSON lines on standard input and are answered by one line each on standard
output. What is LMCache's here: keys, chunks, the storage manager and its backends. What is not: the connector, since its own
ones copy to and from the memory of a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from inspect import signature
from typing import Any

# Before anything of LMCache: it reports its use to its makers unless told not to.
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from lmcache import __version__ as lmcache_version
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StoppingCriteria

STORE_SECONDS = 60.0
"""How long chunks may take until they are all where they are kept: LMCache writes them behind the caller's back."""


class DynamicCacheConnector(GPUConnectorInterface):  # type: ignore[misc] # a library without types
    """Copies rows between memory objects [2, layers, tokens, heads x dim] and tensors [tokens, heads x dim] of each layer."""

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Fills `memory_obj` from rows `start` to `end` of `kwargs["rows"]`, which are (keys, values) of each layer."""
        for layer, tensors in enumerate(kwargs["rows"]):
            for place, tensor in enumerate(tensors):
                memory_obj.tensor[place, layer].copy_(tensor[start:end])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """The reverse."""
        for layer, tensors in enumerate(kwargs["rows"]):
            for place, tensor in enumerate(tensors):
                tensor[start:end].copy_(memory_obj.tensor[place, layer])

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """`from_gpu` of each."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        """`to_gpu` of each."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Of a memory object; the engine asks its metadata instead."""
        raise TypeError(f"nobody asks for the shape of {num_tokens} tokens")


class Clock(StoppingCriteria):  # type: ignore[misc] # as above
    """Notes when the first token was there."""

    def __init__(self) -> None:
        self.at = self.busy = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - the library's interface
        """Never stops anything."""
        if not self.at:
            self.at, self.busy = time.perf_counter(), time.process_time()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Peer:
    """One engine before one place, and a model."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(order["model"], local_files_only=True)
        self.model = self._load(order["model"])
        config = self.model.config
        # transformers renames it.
        self.argument = next(name for name in ("cache", "past_key_values") if name in signature(self.model.forward).parameters)
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = (config.num_hidden_layers, 2, order["chunk_size"], heads, dim)
        self.metadata = LMCacheMetadata(
            model_name=order["name"],
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self.model.dtype,
            kv_shape=self.shape,
            chunk_size=order["chunk_size"],
        )
        settings = LMCacheEngineConfig.from_defaults(chunk_size=order["chunk_size"], **order["settings"])
        self.engine = LMCacheEngineBuilder.get_or_create(
            "bench", settings, self.metadata, DynamicCacheConnector(), lambda tensor, _: tensor, lambda value, _: value
        )
        self.engine.post_init()

    @staticmethod
    def _load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True, use_safetensors=True).eval()

    def store(self, order: dict[str, Any]) -> dict[str, Any]:
        """Prefills a text as the library does, and stores its KV; returns when all chunks are kept."""
        ids = self.tokenizer(order["text"])["input_ids"]
        with torch.inference_mode():
            cache = self.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values
        rows = [tuple(tensor[0].transpose(0, 1).flatten(1) for tensor in layer[:2]) for layer in cache]
        began = time.perf_counter()
        self.engine.store(torch.tensor(ids), rows=rows)
        chunk = self.metadata.chunk_size
        expected = len(ids) // chunk * chunk
        while self.engine.lookup(torch.tensor(ids)) < expected:
            if time.perf_counter() - began > STORE_SECONDS:
                raise TimeoutError(f"LMCache kept only {self.engine.lookup(torch.tensor(ids))} of {expected} tokens")
            time.sleep(0.01)
        keys = [key.to_string() for _, _, key in self.engine.token_database.process_tokens(torch.tensor(ids))]
        return {"tokens": expected, "keys": keys[: expected // chunk], "store_s": time.perf_counter() - began}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Answers a prompt: what LMCache has of it is retrieved, the rest is prefilled."""
        busy, began = time.process_time(), time.perf_counter()
        ids = self.tokenizer(order["prompt"])["input_ids"]
        tokens = torch.tensor(ids)
        # The last token of a prompt is the model's to read, as in the engines that LMCache serves.
        found = min(self.engine.lookup(tokens), len(ids) - 1)
        kept, cache = 0, None
        if found:
            cache, kept = self._retrieve(tokens[:found])
        clock = Clock()
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=tokens[None],
                attention_mask=torch.ones_like(tokens)[None],
                max_new_tokens=order["tokens"],
                do_sample=False,
                **{self.argument: cache},
                stopping_criteria=[clock],
            )
        return {
            "token_ids": output[0, len(ids) :].tolist(),
            "first_token_s": clock.at - began,
            "cpu_s": clock.busy - busy,
            "found": found,
            "kept": kept,
        }

    def _retrieve(self, tokens: torch.Tensor) -> tuple[DynamicCache | None, int]:
        layers, _, _, heads, dim = self.shape
        new = [[torch.empty(len(tokens), heads * dim, dtype=self.model.dtype) for _ in range(2)] for _ in range(layers)]
        kept = int(self.engine.retrieve(tokens, rows=new).sum())
        if not kept:
            return None, 0
        cache = DynamicCache(config=self.model.config)
        for layer, tensors in enumerate(new):
            keys, values = (tensor[:kept].view(1, kept, heads, dim).transpose(1, 2) for tensor in tensors)
            cache.update(keys, values, layer)
        return cache, kept

    def weights(self, order: dict[str, Any]) -> dict[str, Any]:
        """From now on the model has the weights in another folder, under the same name."""
        self.model = self._load(order["folder"])
        return {}


def run() -> None:
    """Serves orders until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    peer: Peer | None = None
    answer: dict[str, Any]
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if peer is None:
                torch.set_num_threads(order["threads"])
                peer = Peer(order)
                answer = {"version": lmcache_version, "torch": str(torch.__version__)}
            else:
                answer = getattr(peer, order["do"])(order)
        except Exception as error:  # noqa: BLE001 - told to whoever ordered, who decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    # Its engine hands its work to threads that never end by themselves.
    run()
    sys.stderr.flush()
    os._exit(0)
