"""Bases: those that blocks name, from memory, from the user's shelf, or from where the blocks come from."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvcdn.basis import BASIS_TOKEN_BYTES, BasisName
from kvcdn.block import open_header, open_segment
from kvcdn.codecs.basis import Basis
from kvcdn.codecs.carrier import uncarry
from kvcdn.digest import Digest
from kvcdn.envelope import MAX_ENVELOPE_BYTES
from kvcdn.errors import CorruptError
from kvcdn.keys import BlockName, ModelIdentity, Namespace, PrefixNames, block_key
from kvcdn.model.shelf import Shelf
from kvcdn.seal import ObjectKeys
from kvcdn.signing import TrustList

_KEPT = 2
"""Bases in memory, of all models: each has some megabytes, and ten times that when its integers are unpacked."""

_known: dict[tuple[BasisName, Digest], Basis] = {}
_lock = threading.Lock()


class Bases:
    """The bases of one model where `read(key, limit)` reads objects. Thread-safe: whoever comes second waits for the first."""

    def __init__(self, read: Callable[[str, int], bytes], model: ModelIdentity) -> None:
        self._read_object = read
        self._model = model
        self._shelf = Shelf(model.tag, model.layout)

    def get(self, name: BasisName, trust: TrustList) -> Basis:
        """The basis `name`. Raises NotFoundError, UnavailableError, UntrustedError or CorruptError."""
        key = (name, self._model.layout.digest)
        with _lock:
            if key not in _known:
                basis = self._shelf.get(name)
                if basis is None:
                    basis = self._fetch(name, trust)
                    self._shelf.put(basis)
                while len(_known) >= _KEPT:
                    del _known[next(iter(_known))]
                _known[key] = basis
            return _known[key]

    def _fetch(self, name: BasisName, trust: TrustList) -> Basis:
        identity = name.identity(self._model)
        names = PrefixNames.of(identity, Namespace.public(), name.token_ids)
        pieces = [self._read(identity, block, trust) for block in names.blocks]
        return uncarry(list(pieces), name, self._model.layout, f"basis {name.digest}")

    def _read(self, identity: ModelIdentity, block: BlockName, trust: TrustList) -> bytearray:
        what = f"basis block {block.address}"
        limit = MAX_ENVELOPE_BYTES + block.tokens * (BASIS_TOKEN_BYTES + 2) + 1024
        data = self._read_object(block_key(identity.tag, block.address), limit)
        header = open_header(data, what)
        trust.require(header.publisher, what)
        header.require(identity, block, what)
        if header.size != len(data):
            raise CorruptError(f"{what}: the object has {len(data)} bytes, its header says {header.size}")
        keys = ObjectKeys(block.content_key, header.salt)
        keys.check_commitment(header.commitment, what)
        outs = [bytearray(part.raw_bytes) for part in header.segments[0].parts]
        stored = memoryview(data)[header.envelope_bytes :]
        open_segment(header, keys, 0, stored, bytearray(), [memoryview(out) for out in outs])
        return outs[0]
