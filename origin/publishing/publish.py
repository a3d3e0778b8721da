"""Publishing: the one path by which KV caches are written.

In native precision prefill runs block by block, and each block is written while the next is computed (`run`). In a lossy
precision the whole document is prefilled first, and its KV encoded, measured and only then written (`lossy`). An interrupted
run leaves whole blocks that the next run picks up, and a second run finds the manifest and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvcdn.errors import UnsupportedModelError, UsageError
from kvcdn.journal import Published
from kvcdn.keys import COARSE_OF, LOSSY, PRECISION_NATIVE, Namespace, PrefixNames
from kvcdn.manifest import MAX_BLOCKS
from kvcdn.model.load import LoadedModel
from kvcdn.origin.publishing.kept import Kept
from kvcdn.origin.publishing.lossy import LossyPublishing
from kvcdn.origin.publishing.result import PublishProgress, PublishResult
from kvcdn.origin.publishing.run import Run
from kvcdn.origin.upkeep.journal import Journal
from kvcdn.signing import SigningKey, TrustList
from kvcdn.store import BlobStore

__all__ = ["PublishProgress", "PublishResult", "Publisher", "check_length"]


class Publisher:
    """Publishes prefixes of one model to one origin under one key. Not thread-safe: the model runs one prefix at a time."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: BlobStore,
        key: SigningKey,
        *,
        namespace: Namespace | None = None,
        trust: TrustList | None = None,
        journal: Journal | None = None,
        tenant: str = "",
    ) -> None:
        """`journal` is the store's with the same key, where there is one already; `tenant` is for whom it publishes."""
        self.kept = Kept()  # or that of the publisher before this one, whose documents may begin alike
        self.loaded = loaded
        self.store = store
        self._key = key
        self._journal = journal or Journal(store, key)
        self._tenant = tenant
        self._namespace = namespace or Namespace.public()
        # Blocks that others published under the same names are used only if they are trusted.
        self._trust = TrustList({**(trust.names if trust else {}), key.public: "myself"})

    def publish(
        self,
        token_ids: Sequence[int],
        *,
        precision: str = PRECISION_NATIVE,
        progressive: bool = False,
        max_kl: float | None = None,
        label: str = "",
        expires: int | None = None,
        progress: Callable[[PublishProgress], None] = lambda _: None,
    ) -> PublishResult:
        """Publishes the prefix `token_ids`; `expires` is a Unix time. Raises UsageError before anything is written.

        A lossy `precision` is measured on the document. Where its mean next-token divergence is above `max_kl` nats, finer
        precisions are tried, native the last, and the result tells which was published. With `progressive` what makes it exact
        is published beside it. The model's adapters must not change while this runs.
        """
        if precision in COARSE_OF:
            raise UsageError(
                f"{precision} is published beside {COARSE_OF[precision]}", hint=f"publish {COARSE_OF[precision]} as progressive"
            )
        if progressive and precision not in LOSSY:
            raise UsageError(
                f"{precision} has no coarse part that could come first", hint=f"progressive goes with one of {', '.join(LOSSY)}"
            )
        self.loaded = self.loaded.current()
        token_ids = published_part(self.loaded, token_ids)
        check_length(self.loaded, len(token_ids))

        def run_for(names: PrefixNames) -> Run:
            made = Run(self.loaded, self.store, self._key, self._trust, names, progress, self._record)
            made.kept = self.kept
            return made

        def run(chosen: str) -> Run:
            return run_for(self._names(token_ids, chosen))

        if precision in LOSSY:
            require_lossy(self.loaded, precision)
            lossy = LossyPublishing(run, run_for, token_ids, max_kl, progressive=progressive)
            found = lossy.publish(precision, label=label, expires=expires)
            if found is not None:
                return self._with_refinement(found.result(self._namespace), lossy.refined)
        native = run(PRECISION_NATIVE)
        native.publish(token_ids, label, expires)
        return native.result(self._namespace)

    def _with_refinement(self, result: PublishResult, refined: Run | None) -> PublishResult:
        """`result`, with what was done to make the document exact."""
        if refined is None:
            return result
        rest = refined.result(self._namespace)
        return replace(
            result,
            status=result.status if rest.status == "exists" else rest.status,
            blocks_uploaded=result.blocks_uploaded + rest.blocks_uploaded,
            uploaded_bytes=result.uploaded_bytes + rest.uploaded_bytes,
            refinement={"address": rest.address, "precision": rest.precision, "stored_bytes": rest.stored_bytes},
        )

    def _record(self, deed: Published) -> None:
        self._journal.append(deed, self._tenant)

    def _names(self, token_ids: Sequence[int], precision: str) -> PrefixNames:
        names = PrefixNames.of(replace(self.loaded.identity, precision=precision), self._namespace, token_ids)
        if len(names.blocks) > MAX_BLOCKS:
            raise UsageError(f"the document has {len(names.blocks)} blocks; a manifest lists at most {MAX_BLOCKS}")
        return names


def published_part(loaded: LoadedModel, token_ids: Sequence[int]) -> Sequence[int]:
    """The leading tokens of a document that are published: all, or less a token where a model keeps states (FORMAT.md 2.3).

    Raises UsageError for a document that is too short.
    """
    end = loaded.identity.layout.document_end(len(token_ids))
    if token_ids and not end:
        raise UsageError(f"the document is too short to be published for {loaded.identity.name} (tokens: {len(token_ids)})")
    return token_ids[:end]


def require_lossy(loaded: LoadedModel, precision: str) -> None:
    """Raises UnsupportedModelError for a model whose KV has no lossy form."""
    if loaded.identity.layout.state_bytes:
        raise UnsupportedModelError(
            f"{loaded.identity.name} keeps states (linear attention), which have no {precision} form",
            hint="publish it in native precision",
        )


def check_length(loaded: LoadedModel, tokens: int) -> None:
    """Raises UsageError for a prefix that `loaded` cannot read, UnsupportedModelError where its keys hang on its length."""
    loaded.require_steady(tokens)
    limit = loaded.max_positions
    if limit is not None and tokens > limit:
        raise UsageError(
            f"the document has {tokens:,} tokens, {loaded.identity.name} reads at most {limit:,}",
            hint="split the document, or choose a model with a longer context",
        )
