"""A manifest before it is created: sealed, and entered in the journal, which comes before the deed (FORMAT.md section 12).

Of a block that is being written everything is known that the manifest says of it. So both are done while the last blocks are on
their way, and again only where another publisher was faster with one of them: an entry without its deed is harmless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcdn.certificate import Certificate
from kvcdn.digest import hash_bytes
from kvcdn.journal import Published
from kvcdn.keys import PrefixNames
from kvcdn.manifest import BlockEntry, Manifest
from kvcdn.producer import Producer
from kvcdn.signing import SigningKey


@dataclass
class Draft:
    """The manifest of one prefix, whose blocks are yet to be told."""

    names: PrefixNames
    producer: Producer
    key: SigningKey
    record: Callable[[Published], object]
    certificate: Certificate | None
    label: str
    expires: int | None
    _done: tuple[Manifest, bytes] | None = field(default=None, init=False)

    def of(self, blocks: Sequence[BlockEntry]) -> tuple[Manifest, bytes]:
        """The manifest that names `blocks`, and its bytes, of which the journal knows. Raises UnavailableError."""
        if self._done is None or self._done[0].blocks != tuple(blocks):
            model = self.names.model
            manifest = Manifest(
                address=self.names.manifest_address,
                fingerprint=model.fingerprint,
                model_name=model.name,
                layout=model.layout,
                precision=model.precision,
                tokens=self.names.tokens,
                blocks=tuple(blocks),
                created=int(time.time()),
                expires=self.expires,
                label=self.label,
                producer=self.producer,
                certificate=self.certificate,
            )
            data = manifest.seal(self.key)
            self.record(Published(model.tag, manifest.address, hash_bytes(data), self.expires))
            self._done = manifest, data
        return self._done
