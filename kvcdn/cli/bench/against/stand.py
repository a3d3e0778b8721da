"""What all ways share: the model, its tokenizer, prompts, the library's own prefill, and timed answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from kvcdn.cli.bench.against.way import Document, Reading, Stopwatch
from kvcdn.cli.stock import timed_answer
from kvcdn.client import Client
from kvcdn.client.sources.sources import open_source
from kvcdn.errors import UsageError
from kvcdn.keys import PRECISION_NATIVE
from kvcdn.model.load import LoadedModel, load_model
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.local import LocalStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from kvcdn.client.sources.source import Source

NOISE = 0.1
"""The other weights: each matrix with so much of its own standard deviation added as noise, a fine-tune's stand-in."""


class Stand:
    """The model under test. Not thread-safe."""

    def __init__(self, model: str, device: str, folder: Path) -> None:
        self.loaded: LoadedModel = load_model(model, device)
        self._first: PreTrainedModel = self.loaded.model
        self._folder = folder
        self._other: LoadedModel | None = None
        self.model_name = self.loaded.identity.name.replace("/", "-")
        self.key = SigningKey.generate()
        self.client = self.make_client(open_source("memory:"))
        self._rows: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def checkpoint(self) -> Path:
        """The folder of the model's files."""
        return Path(self._first.config._name_or_path)  # noqa: SLF001 - the only record of where it came from

    def make_client(self, source: Source, *, precision: str = PRECISION_NATIVE, local: LocalStore | None = None) -> Client:
        """A client of kvcdn that has met nobody, with the weights in use. It fetches, also where prefilling were faster."""
        loaded = self._other or self.loaded
        trust = TrustList.of(self.key.public)
        return Client(loaded.model, loaded.tokenizer, source, trust=trust, precision=precision, local_store=local, mode="fetch")

    def use_weights(self, folder: Path | None) -> None:
        """The weights in `folder`, or the first ones again."""
        self._other = load_model(str(folder), str(self._first.device)) if folder else None
        self.client = self.make_client(open_source("memory:"))

    def other_checkpoint(self) -> Path:
        """A folder of the same name with other weights: what a fine-tune leaves under an old name."""
        target = self._folder / "other" / self.checkpoint.name
        if not (target / "config.json").exists():
            model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype="auto", local_files_only=True)
            chance = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        noise = torch.empty_like(weight, device="cpu").normal_(generator=chance)
                        weight.add_(noise * (NOISE * weight.float().std().item()))
            model.save_pretrained(target)
            self.loaded.tokenizer.save_pretrained(target)
        return target

    def stock_rows(self, document: Document) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, [1, heads, tokens, dim], from one pass of the library's own over the document."""
        if document.text not in self._rows:
            ids = torch.tensor([self.client.encode(document.text).token_ids], device=self._first.device)
            with torch.inference_mode():
                output = self._first(input_ids=ids, use_cache=True, logits_to_keep=1)
            cache = output.cache if "cache" in output else output.past_key_values  # transformers renames it
            self._rows[document.text] = [(layer.keys, layer.values) for layer in cache.layers]
        return self._rows[document.text]

    def prompt(self, document: Document, question: str) -> str:
        """The text of a question on a document, as `Client.question` makes it."""
        text = f"{document.text}\n\nQuestion: {question}\nAnswer:"
        if self.client.encode(text).token_ids != self.client.question(document.text, question).token_ids:
            raise UsageError("the prompt of the benchmark is not the client's")
        return text

    def forget_rows(self) -> None:
        """Frees the rows of `stock_rows`."""
        self._rows.clear()

    def answer(
        self,
        watch: Stopwatch,
        document: Document,
        question: str,
        tokens: int,
        *,
        cache: Cache | None = None,
        reused: int = 0,
    ) -> Reading:
        """Greedy tokens from `cache`, or by prefilling, timed from the start of `watch`."""
        token_ids = self.client.question(document.text, question).token_ids
        found = timed_answer(self.client, token_ids, cache, tokens, watch.started)
        return Reading(found.token_ids, found.first_token_s, watch.cpu_s, reused)
