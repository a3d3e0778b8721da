"""The rig of demo and benchmarks: a real document published into a temporary origin, an edge process before it, and a client.

Nothing of the user's is touched: keys, trust and folders are the rig's own and vanish with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcdn.cli.options import quiet_libraries
from kvcdn.errors import UsageError

if TYPE_CHECKING:
    from kvcdn.client import Client
    from kvcdn.edge.launch import RunningEdge
    from kvcdn.origin.publishing.publish import PublishProgress, PublishResult

QUESTION = "What is this document about?"

_SYSTEM_DOCUMENT = Path("/usr/share/common-licenses/GPL-3")
"""A real text on every Debian machine; elsewhere Python's own reference topics serve."""


@dataclass(frozen=True)
class Rig:
    """What a measurement needs. `client` reads from `edge`, whose cache is cold until somebody asks.

    `local_client` does as well, but keeps what it fetched in the local store at `local_folder`.
    """

    client: Client
    local_client: Client
    local_folder: Path
    edge: RunningEdge
    document: str
    published: PublishResult
    origin: str


@contextmanager
def running_rig(
    model: str, document: Path | None, tokens: int, progress: Callable[[PublishProgress], None], *, device: str = "cpu"
) -> Iterator[Rig]:
    """Publishes the first `tokens` tokens of `document` (by default a text found on the machine) and serves them."""
    quiet_libraries()
    from kvcdn.client import Client  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.client.sources.sources import open_source  # noqa: PLC0415
    from kvcdn.edge.launch import launch_edge  # noqa: PLC0415
    from kvcdn.model.load import bind_model, load_transformers  # noqa: PLC0415
    from kvcdn.model.tokens import encode_text  # noqa: PLC0415
    from kvcdn.origin.publishing.publish import Publisher  # noqa: PLC0415
    from kvcdn.signing import SigningKey, TrustList  # noqa: PLC0415
    from kvcdn.stores import open_store  # noqa: PLC0415
    from kvcdn.stores.local import LocalStore  # noqa: PLC0415

    transformer, tokenizer, checkpoint = load_transformers(model, device)
    loaded = bind_model(transformer, tokenizer, checkpoint)
    text = first_tokens(tokenizer, document_text(document), tokens)
    key = SigningKey.generate()
    with tempfile.TemporaryDirectory(prefix="kvcdn-") as folder:
        origin = str(Path(folder) / "origin")
        publisher = Publisher(loaded, open_store(origin), key)
        published = publisher.publish(encode_text(tokenizer, text).token_ids, progress=progress)
        with launch_edge(origin=origin, cache_dir=Path(folder) / "cache", log_level="warning") as edge:
            source, trust, local = open_source(edge.url), TrustList.of(key.public), Path(folder) / "local"
            # What is to be shown is fetching, also where something else would be faster.
            common: dict[str, Any] = {"checkpoint": checkpoint, "trust": trust, "mode": "fetch"}
            with (
                Client(transformer, tokenizer, source, local_store=None, **common) as client,
                Client(transformer, tokenizer, source, local_store=LocalStore(local), **common) as local_client,
            ):
                yield Rig(client, local_client, local, edge, text, published, origin)


def document_text(document: Path | None) -> str:
    """The text of `document`, or of one that is on the machine."""
    from kvcdn.origin.publishing.sources import read_document  # noqa: PLC0415 - see kvcdn.cli

    if document is not None:
        return read_document(str(document)).text
    if _SYSTEM_DOCUMENT.is_file():
        return _SYSTEM_DOCUMENT.read_text("utf-8")
    from pydoc_data.topics import topics  # noqa: PLC0415 - 700 kB, wanted here only

    return "\n\n".join(str(text) for text in topics.values())


def first_tokens(tokenizer: object, text: str, tokens: int) -> str:
    """The start of `text` that is `tokens` tokens long. Raises UsageError where it is shorter."""
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)  # type: ignore[operator] # a transformers tokenizer
    if len(encoded["input_ids"]) < tokens:
        raise UsageError(
            f"the document has {len(encoded['input_ids']):,} tokens, {tokens:,} are asked for", hint="give --document"
        )
    return text[: encoded["offset_mapping"][tokens - 1][1]]
