"""Surroundings: what else this machine knows that a document may have been published with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvcdn.client.explaining.shelf import Shelf
from kvcdn.digest import Digest
from kvcdn.errors import KvcdnError
from kvcdn.keyring import load_namespace, namespace_names
from kvcdn.keys import ModelIdentity, Namespace
from kvcdn.model.fingerprint import config_differences, remembered_checkpoints
from kvcdn.model.identity import empty_layout, load_tokenizer

_NAMESPACES = 32
_IDENTITIES = 32
_CHECKPOINTS = 8
"""Tried at most: each costs a request per trial, each checkpoint besides a tenth of a second to look at."""


@dataclass(frozen=True)
class Surroundings:
    """Other namespaces, models, and tokenizers of the same model, each with a name; where checkpoints lie, ours among them."""

    namespaces: Sequence[Namespace] = ()
    identities: Sequence[ModelIdentity] = ()
    tokenizers: Sequence[tuple[str, PreTrainedTokenizerBase]] = field(default=(), repr=False)
    folders: Mapping[Digest, Path] = field(default_factory=dict)

    def local_difference(self, ours: ModelIdentity, theirs: ModelIdentity) -> str:
        """In what two checkpoints differ, where both lie on this machine; otherwise nothing."""
        here, there = self.folders.get(ours.fingerprint), self.folders.get(theirs.fingerprint)
        if here is None or there is None:
            return ""
        with suppress(KvcdnError):
            keys = config_differences(here, there)
            return f"; {there} is that one, and differs from yours in " + (", ".join(keys) if keys else "its weights")
        return ""


def look_around(identity: ModelIdentity, shelf: Shelf, folder: Path | None = None) -> Surroundings:
    """The namespaces of this user, the models of the shelf's documents, and the checkpoints that were used on this machine.

    `folder` is where the model of `identity` was loaded from, where that is known.
    """
    identities, tokenizers = list(shelf.identities()[:_IDENTITIES]), []
    remembered = remembered_checkpoints()
    folders = {fingerprint: paths[0] for fingerprint, paths in remembered.items()}
    if folder is not None:
        folders[identity.fingerprint] = folder
    for path in remembered.get(identity.fingerprint, [])[:_CHECKPOINTS]:
        if folder is None or path != folder.resolve():
            with suppress(KvcdnError):
                tokenizers.append((str(path), load_tokenizer(path)))
    others = [(fingerprint, path) for fingerprint, path in folders.items() if fingerprint != identity.fingerprint]
    for fingerprint, path in others[:_CHECKPOINTS]:
        with suppress(KvcdnError):
            identities.append(replace(identity, fingerprint=fingerprint, layout=empty_layout(path), name=path.name))
    return Surroundings(_namespaces(), identities, tokenizers, folders)


def _namespaces() -> list[Namespace]:
    found = [Namespace.public()]
    for name in namespace_names()[:_NAMESPACES]:
        with suppress(KvcdnError):
            found.append(load_namespace(name))
    return found
