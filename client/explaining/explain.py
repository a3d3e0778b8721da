"""Explanations: at which token a prompt leaves what is published, and why.

What is proved (by names that exist, or by comparing with a document) comes before what is only likely, and of what is
proved the first cause in the prompt comes first: behind it, all names are others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from kvcdn.block import BlockHeader, open_header
from kvcdn.client.explaining.causes import Cause, Certainty
from kvcdn.client.explaining.divergence import Excerpt, find_divergence
from kvcdn.client.explaining.explanation import Departure, Explanation, Finding
from kvcdn.client.explaining.fixes import compare_identities
from kvcdn.client.explaining.framing import framing_cause
from kvcdn.client.explaining.proof import Proof, Search, Step
from kvcdn.client.explaining.samples import Conversation
from kvcdn.client.explaining.shelf import Reach, Shelf
from kvcdn.client.explaining.surroundings import Surroundings
from kvcdn.client.explaining.views import View
from kvcdn.client.explaining.volatile import find_volatile
from kvcdn.client.loading.report import MissReason
from kvcdn.client.sources.source import Source
from kvcdn.envelope import BLOCK_MAGIC, PREAMBLE_BYTES, envelope_size
from kvcdn.errors import CorruptError, KvcdnError, NotFoundError, QualityError, UntrustedError, UsageError
from kvcdn.keys import BlockName, ModelIdentity, block_key
from kvcdn.manifest import Manifest
from kvcdn.model.tokens import Spelling
from kvcdn.revocation import Revocations
from kvcdn.signing import TrustList

_HEADER_AHEAD = 1 << 16
"""Bytes read at once of a block's front: most headers."""

_HEADERS = 8
"""Blocks whose headers are read: at an edge each may have to come from the origin, as a whole."""

_SEAMS = 64
"""Ends of lines at which a document's end is looked for."""

_SUSPECTS = 5
"""Volatile pieces named where nothing is proved."""


Reference = View | Manifest
"""What a prompt is compared with: a document, or a published one's manifest."""


def cause_of(error: KvcdnError) -> Cause:
    """The cause that has the word of an error's `MissReason`."""
    return Cause(MissReason.of(error).value)


class Explainer:
    """Explains prompts against one shelf.

    `surroundings` are what else is tried, `trust` whose blocks may be used, `max_kl` how far off lossy ones may be, in nats,
    and `revocations` what is not to be used any more.
    """

    def __init__(
        self,
        shelf: Shelf,
        trust: TrustList,
        surroundings: Surroundings | None = None,
        max_kl: float | None = None,
        revocations: Revocations | None = None,
    ) -> None:
        self._shelf = shelf
        self._revocations = revocations or Revocations()
        self._trust = trust.revoking(self._revocations.publishers)
        self._surroundings = surroundings or Surroundings()
        self._max_kl = max_kl

    def explain(self, view: View, reference: Reference | None = None) -> Explanation:
        """Says how far `view` is published and why no further. Raises UsageError for a prompt that cannot be tokenised."""
        spelling = view.spell()
        if not spelling.token_ids:
            raise UsageError("the prompt is empty")
        source = self._shelf.source
        found = Explanation(source.url if source else "", view.identity, view.namespace.name, len(spelling.token_ids))
        try:
            self._explain(found, view, spelling, reference)
        except UsageError:
            raise
        except KvcdnError as error:
            found.findings.insert(0, Finding(cause_of(error), Certainty.PROVED, str(error)))
        found.sort()
        return found

    def _explain(self, found: Explanation, view: View, spelling: Spelling, reference: Reference | None) -> None:
        self._revocations.require_model(view.identity.tag)
        served = self._shelf.served(view, spelling)
        found.published = self._trusted(found, view, served.blocks)
        if found.published < served.tokens:
            self._depart(found, spelling, found.published, exact=False)
            return
        if isinstance(reference, View):
            self._compare(found, view, spelling, reference)
        elif reference is not None:
            self._compare_manifest(found, view, spelling, reference)
        else:
            self._prove(found, view, spelling)
        self._look_at_document(found, view, spelling)
        if not found.covered:
            self._depart(found, spelling, found.published, exact=False)
            _suspect(found, view, spelling)

    # -- what is there ----------------------------------------------------------------------------------------------------

    def _trusted(self, found: Explanation, view: View, blocks: Sequence[BlockName]) -> int:
        """The tokens of the leading blocks that are not revoked, and are sound and signed by a trusted key where looked at."""
        step = max(-(-len(blocks) // _HEADERS), 1)
        looked, revoked = 0, self._revocations.lead(block.address for block in blocks)
        for index in sorted({*range(0, len(blocks), step), min(revoked, len(blocks) - 1)} - {-1}):
            if self._problem(view, blocks[index]) is not None:
                # The first bad one lies here, or between this and the last that was good.
                return self._first_bad(found, view, blocks[looked : index + 1])
            looked = index + 1
        return blocks[-1].end if blocks else 0

    def _first_bad(self, found: Explanation, view: View, blocks: Sequence[BlockName]) -> int:
        for name in blocks:
            problem = self._problem(view, name)
            if problem is not None:
                found.add(cause_of(problem), Certainty.PROVED, str(problem), name.start)
                return name.start
        return blocks[-1].end

    def _problem(self, view: View, name: BlockName) -> KvcdnError | None:
        """What keeps a client from using a block, as far as its name and its header show."""
        source = self._shelf.source
        try:
            self._revocations.require_address(name.address)
            if source is not None:
                header = _read_header(source, view.identity, name, self._trust)
                if header.certificate is not None and not header.certificate.meets(self._max_kl):
                    return QualityError(f"block {name.address}: {header.certificate}; at most {self._max_kl:g} is accepted")
        except KvcdnError as error:
            return error
        return None

    def _look_at_document(self, found: Explanation, view: View, spelling: Spelling) -> None:
        """Whether a document ends where the published tokens do, and whether whole blocks are left."""
        chain, length = view.chain(spelling), view.identity.layout.block_tokens
        if found.published:
            found.document = self._shelf.document(chain, found.published)
        whole = len(spelling.token_ids) // length * length
        mended = any(finding.certainty is Certainty.PROVED for finding in found.findings)
        if found.document is not None and not mended and found.published < len(spelling.token_ids):
            found.add(Cause.DOCUMENT_END, Certainty.PROVED, "a published document ends here", found.published)
            self._depart(found, spelling, found.published, exact=True)
        found.covered = not mended and found.published > 0 and (found.document is not None or found.published >= whole)

    def _depart(
        self, found: Explanation, spelling: Spelling, token: int, *, exact: bool, theirs: Excerpt | None = None
    ) -> None:
        if found.departure is None:
            block = token // found.identity.layout.block_tokens
            found.departure = Departure(token, block, exact, Excerpt.at(spelling, token), theirs)

    # -- without a document to compare with -------------------------------------------------------------------------------

    def _prove(self, found: Explanation, view: View, spelling: Spelling) -> None:
        chain = view.chain(spelling)
        known = self._shelf.known(chain)
        if known.manifest is not None and known.tokens > found.published:
            self._unseen(found, view, spelling, known.manifest, known.tokens)
            return
        end = self._shelf.ends(chain, _seams(spelling, found.published, chain.block_tokens))
        if end and self._problem(view, chain.prefix(end).blocks[-1]) is None:
            self._bound(found, spelling, f"a document of {end:,} tokens", end)
            return
        proof = self._search(found, self._shelf, view, spelling, Reach(found.published))
        self._report(found, spelling, proof)

    def _search(
        self, found: Explanation, shelf: Shelf, view: View, spelling: Spelling, reach: Reach, *more: ModelIdentity
    ) -> Proof:
        around = replace(self._surroundings, identities=[*more, *self._surroundings.identities])
        search = Search(shelf, around)
        proof = search.prove(view, spelling, reach)
        found.complete = found.complete and search.complete
        return proof

    def _bound(self, found: Explanation, spelling: Spelling, name: str, tokens: int) -> None:
        detail = f"{name} is the beginning of this prompt, which does not say that it ends after {tokens:,} tokens"
        found.add(Cause.BOUNDARY, Certainty.PROVED, detail, found.published, tokens)
        self._depart(found, spelling, tokens, exact=True)

    def _unseen(self, found: Explanation, view: View, spelling: Spelling, manifest: Manifest, tokens: int) -> None:
        """A manifest shares more with the prompt than the source was seen to have."""
        blocks = view.chain(spelling).prefix(tokens).blocks
        source = self._shelf.source
        there = source.match(view.identity.tag, [block.address for block in blocks]) if source else 0
        name = f"document {str(manifest.address)[:12]} of {manifest.tokens:,} tokens"
        if there == len(blocks):
            self._bound(found, spelling, name, tokens)
        elif _expired(manifest):
            detail = f"{name} expired on {_day(manifest.expires)}, and its blocks are gone"
            found.add(Cause.EXPIRED, Certainty.PROVED, detail, found.published, tokens)
        else:
            found.add(Cause.INCOMPLETE, Certainty.PROVED, f"{name} lacks blocks", found.published, tokens)
        self._depart(found, spelling, found.published, exact=True)

    def _report(self, found: Explanation, spelling: Spelling, proof: Proof) -> None:
        if proof.steps and proof.reach.manifest is None:
            # A source can say anything: a block that opens under the name proves it.
            last = proof.view.chain(proof.spelling).prefix(proof.reach.tokens).blocks[-1]
            problem = self._problem(proof.view, last)
            if problem is not None:
                found.add(cause_of(problem), Certainty.PROVED, str(problem), 0)
            if isinstance(problem, CorruptError | NotFoundError):
                return
        steps = sorted(proof.steps, key=lambda step: step.token)
        for step in steps:
            found.add(step.fix.cause, Certainty.PROVED, step.fix.detail, step.token, proof.reach.tokens)
        if steps:
            token = steps[0].token
            changed = find_divergence(spelling, proof.spelling, found.identity.layout.block_tokens)
            self._depart(found, spelling, token, exact=True, theirs=changed.theirs if changed else None)

    # -- with one ---------------------------------------------------------------------------------------------------------

    def _compare(self, found: Explanation, view: View, spelling: Spelling, reference: View) -> None:
        theirs = reference.spell()
        if not theirs.token_ids:
            raise UsageError("the document to compare with is empty")
        proof = self._search(found, self._shelf, reference, theirs, self._shelf.reach(reference, theirs))
        if not proof.reach.tokens:
            detail = f"the document compared with is not published at {found.source} for this model and namespace itself"
            found.add(Cause.NOT_PUBLISHED, Certainty.PROVED, detail)
        for step in proof.steps:
            if _is_naming(step):
                found.add(step.fix.cause, Certainty.PROVED, step.fix.detail, 0, proof.reach.tokens)
        special = frozenset(view.tokenizer.all_special_ids)
        parted = find_divergence(spelling, proof.spelling, view.identity.layout.block_tokens, special)
        if parted is not None:
            certainty = Certainty.PROVED if proof.reach.tokens > parted.token else Certainty.LIKELY
            cause, detail = framing_cause(view, proof.view, spelling, parted)
            found.add(cause, certainty, detail, parted.token, proof.reach.tokens or None)
            self._depart(found, spelling, parted.token, exact=True, theirs=parted.theirs)
        elif not proof.steps and found.published < proof.reach.tokens < len(spelling.token_ids):
            self._bound(found, spelling, "the document compared with", proof.reach.tokens)

    def _compare_manifest(self, found: Explanation, view: View, spelling: Spelling, manifest: Manifest) -> None:
        ours = view.identity
        theirs = ModelIdentity(manifest.fingerprint, manifest.layout, manifest.model_name, manifest.precision)
        shelf = Shelf(None, [manifest])
        shared = shelf.known(view.chain(spelling)).tokens
        proof = self._search(found, shelf, view, spelling, Reach(shared), theirs)
        self._report(found, spelling, proof)
        if (theirs.fingerprint, theirs.layout, theirs.precision) != (ours.fingerprint, ours.layout, ours.precision):
            cause, detail = compare_identities(ours, theirs, self._surroundings)
            found.add(cause, Certainty.PROVED, detail, 0, proof.reach.tokens or None)
        self._state_of(found, manifest)
        if not shared and not proof.steps:
            detail = (
                "no block of that document is named by this prompt: its text differs within the first block, or its namespace"
            )
            found.add(Cause.TEXT, Certainty.LIKELY, detail, 0)
        elif shared > found.published:
            self._unseen(found, view, spelling, manifest, shared)
        elif not proof.steps and shared < min(manifest.tokens, len(spelling.token_ids)):
            where = f"its text differs from that document's within block {shared // ours.layout.block_tokens}"
            found.add(Cause.TEXT, Certainty.LIKELY, where, shared)

    def _state_of(self, found: Explanation, manifest: Manifest) -> None:
        """What is wrong with a document itself: its publisher, its expiry, its blocks."""
        if manifest.publisher is not None:
            try:
                self._trust.require(manifest.publisher, f"manifest {manifest.address}")
            except UntrustedError as error:
                found.add(Cause.UNTRUSTED, Certainty.PROVED, str(error), 0)
        source = self._shelf.source
        there = source.match(manifest.tag, [block.address for block in manifest.blocks]) if source else 0
        if there < len(manifest.blocks):
            gone = f"{found.source} has {there} of its {len(manifest.blocks)} blocks"
            if _expired(manifest):
                found.add(Cause.EXPIRED, Certainty.PROVED, f"expired on {_day(manifest.expires)}; {gone}")
            else:
                found.add(Cause.INCOMPLETE if there else Cause.NOT_PUBLISHED, Certainty.PROVED, gone)


def _read_header(source: Source, identity: ModelIdentity, name: BlockName, trust: TrustList) -> BlockHeader:
    """Reads a block's header as a client does. Raises KvcdnError."""
    what = f"block {name.address}"
    reader = source.open(block_key(identity.tag, name.address), ranged=True)
    try:
        preamble = bytes(reader.read_exact(PREAMBLE_BYTES, _HEADER_AHEAD))
        rest = reader.read_exact(envelope_size(preamble, BLOCK_MAGIC, what) - PREAMBLE_BYTES, _HEADER_AHEAD)
        header = open_header(preamble + bytes(rest), what)
    finally:
        reader.close()
    trust.require(header.publisher, what)
    header.require(identity, name, what)
    return header


def _is_naming(step: Step) -> bool:
    return step.fix.cause in (Cause.NAMESPACE, Cause.PRECISION, Cause.LAYOUT, Cause.REVISION)


def _seams(spelling: Spelling, tokens: int, block_tokens: int) -> list[int]:
    """Where a document may end in the block behind the first `tokens` tokens: the ends of lines, longest first."""
    known = {len(spelling.token_ids), *spelling.prompt.boundaries}
    begin, end = spelling.character(tokens), spelling.character(tokens + block_tokens)
    ends = {spelling.tokens_before(match.start()) for match in _LINE_END.finditer(spelling.text, begin, end)}
    ends |= {spelling.tokens_before(match.end()) for match in _LINE_END.finditer(spelling.text, begin, end)}
    return sorted((each for each in ends - known if tokens < each < tokens + block_tokens), reverse=True)[:_SEAMS]


_LINE_END = re.compile(r"\s*\n\s*")


def _suspect(found: Explanation, view: View, spelling: Spelling) -> None:
    """What is likely where nothing is proved."""
    length, total = view.identity.layout.block_tokens, len(spelling.token_ids)
    end = min(found.published + length, total)
    if found.proved:
        return
    if not found.published and total < length:
        detail = f"the prompt has {total:,} tokens and a block {length:,}: it is found only where a document ends as it does"
        found.add(Cause.SHORT, Certainty.LIKELY, detail)
    if (
        view.tokenizer.chat_template
        and "strftime_now" in str(view.tokenizer.chat_template)
        and isinstance(view.content, Conversation)
    ):
        detail = "the model's chat template may write today's date into the prompt"
        found.add(Cause.TIMESTAMP, Certainty.LIKELY, detail)
    pieces = find_volatile(spelling.text, spelling.character(found.published), spelling.character(end))
    for piece, _ in zip(pieces, range(_SUSPECTS), strict=False):
        detail = f"{piece.name} stands within the first block that is not published: {piece.text[:80]!r}"
        found.add(piece.cause, Certainty.LIKELY, detail, spelling.token(piece.start))
    what = "no further document" if found.published else "no document"
    found.add(Cause.NOT_PUBLISHED, Certainty.LIKELY, f"{what} at {found.source} begins like this prompt", found.published)


def _expired(manifest: Manifest) -> bool:
    return manifest.expires is not None and manifest.expires < time.time()


def _day(unix: int | None) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix or 0))
