"""A tiny model with tools in its template, a store, and prompts that are explained against what is published there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvcdn.client.explaining.explain import Explainer, Explanation
from kvcdn.client.explaining.samples import Conversation
from kvcdn.client.explaining.shelf import Shelf
from kvcdn.client.explaining.surroundings import Surroundings, look_around
from kvcdn.client.explaining.views import View
from kvcdn.client.sources.stored import StoreSource
from kvcdn.keys import Namespace
from kvcdn.manifest import Manifest
from kvcdn.model.load import LoadedModel, load_model
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.origin.upkeep.catalog import list_published
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.memory import MemoryStore
from support.tiny import CHAT_TEMPLATE, TEXT, tiny_checkpoint, tiny_tokenizer

TOOLS_TEMPLATE = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + CHAT_TEMPLATE

BASE = TEXT[:4400]
"""A little more than one block of 1,024 tokens."""


def checkpoint_with_tools(folder: Path, **options: Any) -> Path:
    """A tiny checkpoint whose chat template writes tools in front of the messages."""
    tiny_checkpoint(folder, **options)
    tokenizer = tiny_tokenizer(folder)
    tokenizer.chat_template = TOOLS_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Stage:
    """One model and one signing key; every test publishes into a store of its own."""

    folder: Path
    loaded: LoadedModel
    key: SigningKey = field(default_factory=SigningKey.generate)
    store: MemoryStore = field(default_factory=MemoryStore)

    @classmethod
    def at(cls, folder: Path) -> Stage:
        return cls(folder, load_model(str(folder)))

    def fresh(self) -> Stage:
        """The same model with an empty store."""
        return replace(self, store=MemoryStore())

    def in_dtype(self, dtype: torch.dtype) -> Stage:
        """The same checkpoint, loaded in another dtype."""
        from kvcdn.model.probe import probe_layout

        other = load_model(str(self.folder))
        identity = replace(other.identity, layout=probe_layout(other.model.to(dtype)))
        return replace(self, loaded=replace(other, identity=identity))

    def view(self, content: str | Conversation, **options: Any) -> View:
        options = {"namespace": Namespace.public(), "answer_follows": True, **options}
        return View(content, self.loaded.tokenizer, self.loaded.identity, **options)

    def publish(
        self, what: str | Conversation | View, *, ids: tuple[int, ...] | None = None, expires: int | None = None
    ) -> tuple[int, ...]:
        """Publishes a document and returns its token ids."""
        view = what if isinstance(what, View) else self.view(what, answer_follows=False)
        ids = ids or view.spell().token_ids
        publisher = Publisher(self.loaded, self.store, self.key, namespace=view.namespace)
        publisher.publish(ids, expires=expires)
        return ids

    def manifests(self) -> list[Manifest]:
        return [listed.manifest for listed in list_published(self.store) if listed.manifest]

    def explain(
        self,
        what: str | Conversation | View,
        against: str | Conversation | View | Manifest | None = None,
        *,
        listed: bool = False,
        trust: TrustList | None = None,
        around: Surroundings | None = None,
        source: Any = None,
    ) -> Explanation:
        """Explains a prompt by names alone, or, where `listed`, with the store's manifests known."""
        view = what if isinstance(what, View) else self.view(what)
        if isinstance(against, str | Conversation):
            against = self.view(against, answer_follows=False)
        shelf = Shelf(source or StoreSource(self.store), self.manifests() if listed else ())
        around = look_around(view.identity, shelf, self.folder) if around is None else around
        return Explainer(shelf, trust or TrustList.of(self.key.public), around).explain(view, against)


def first_different(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """The index by the definition, token by token."""
    return next((index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
