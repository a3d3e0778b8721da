"""Shelf: what is published, as far as one can see it: a source that is asked, and manifests that were read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvcdn.client.explaining.views import View
from kvcdn.client.loading.match import PublishedPrefix, find_in_precisions, find_published
from kvcdn.client.sources.source import Source
from kvcdn.digest import Digest
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError
from kvcdn.keys import Chain, ModelIdentity, manifest_key
from kvcdn.manifest import MAX_MANIFEST_BYTES, Manifest, open_manifest
from kvcdn.model.tokens import Spelling


@dataclass(frozen=True)
class Reach:
    """How far a prompt goes along with what is published; `manifest` names a document that goes so far, where one is known."""

    tokens: int = 0
    manifest: Manifest | None = None


class Shelf:
    """A source, and the manifests that are known besides: those an origin lists, or the one that was named."""

    def __init__(self, source: Source | None, manifests: Iterable[Manifest] = ()) -> None:
        self.source = source
        self.manifests = tuple(manifests)
        self._by_seed: dict[tuple[Digest, Digest, str], list[Manifest]] = {}
        for manifest in self.manifests:
            self._by_seed.setdefault((manifest.fingerprint, manifest.layout.digest, manifest.precision), []).append(manifest)

    def preferred(self, view: View, precisions: Sequence[str]) -> View:
        """`view` in the one of a reader's `precisions` that a client would load; the first where a source cannot be asked."""
        if self.source is not None and len(precisions) > 1:
            with suppress(UnavailableError):
                prompt = view.spell().prompt
                identity, _ = find_in_precisions(self.source, view.identity, precisions, view.namespace, prompt)
                return replace(view, identity=identity)
        return replace(view, identity=replace(view.identity, precision=precisions[0]))

    def identities(self) -> list[ModelIdentity]:
        """The models, layouts and precisions of the manifests, each once."""
        return [ModelIdentity(m.fingerprint, m.layout, m.model_name, m.precision) for m, *_ in self._by_seed.values()]

    def reach(self, view: View, spelling: Spelling) -> Reach:
        """How far `view` is published: by the manifests, which is free, or by asking the source. Raises KvcdnError."""
        chain = view.chain(spelling)
        known = self.known(chain)
        if self.source is None:
            return known
        served = find_published(self.source, chain, spelling.prompt.boundaries)
        return known if known.tokens >= served.tokens else Reach(served.tokens)

    def served(self, view: View, spelling: Spelling) -> PublishedPrefix:
        """The blocks that a client would find. Raises KvcdnError."""
        if self.source is None:
            return PublishedPrefix(())
        return find_published(self.source, view.chain(spelling), spelling.prompt.boundaries)

    def known(self, chain: Chain) -> Reach:
        """The manifest that shares most leading blocks with `chain`, its last block included where that is in the prompt."""
        model, best = chain.model, Reach()
        blocks = [block.address for block in chain.prefix(chain.tokens).blocks]
        for manifest in self._by_seed.get((model.fingerprint, model.layout.digest, model.precision), []):
            tokens = _shared(chain, blocks, manifest)
            if tokens > best.tokens:
                best = Reach(tokens, manifest)
        return best

    def ends(self, chain: Chain, ends: Iterable[int]) -> int:
        """The first of `ends` (token counts) that has a published block which ends there; 0 for none. Raises KvcdnError."""
        for end in ends:
            last = chain.prefix(end).blocks[-1:]
            if self.source is not None and self.source.match(chain.model.tag, [block.address for block in last]):
                return end
        return 0

    def document(self, chain: Chain, tokens: int) -> Manifest | None:
        """The manifest of exactly the first `tokens` tokens of `chain`, where there is one that can be read."""
        names = chain.prefix(tokens)
        found = next((m for m in self.manifests if m.address == names.manifest_address), None)
        if found is not None or self.source is None:
            return found
        try:
            data = self.source.read(manifest_key(chain.model.tag, names.manifest_address), MAX_MANIFEST_BYTES)
            manifest = open_manifest(data, f"manifest {names.manifest_address}")
        except (NotFoundError, CorruptError):  # blocks are used without it
            return None
        return manifest if manifest.address == names.manifest_address else None


def _shared(chain: Chain, blocks: list[Digest], manifest: Manifest) -> int:
    """Leading tokens that a manifest's document shares with the chain, in whole blocks and the document's last."""
    tokens = 0
    for index, entry in enumerate(manifest.blocks):
        whole = entry.tokens == chain.block_tokens
        if whole and index < len(blocks) and blocks[index] == entry.address:
            tokens += entry.tokens
        elif not whole and tokens + entry.tokens <= chain.tokens:
            tail = chain.prefix(tokens + entry.tokens).blocks[-1]
            return tokens + entry.tokens if tail.address == entry.address else tokens
        else:
            return tokens
    return tokens
