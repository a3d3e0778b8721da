"""`kvcdn inspect`: what one object is, as far as it shows without keys."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcdn.certificate import Certificate
from kvcdn.cli.options import AsJson, Endpoint, Origin, TrustFile, open_origin, trust_list
from kvcdn.cli.output import print_json, print_pairs, size
from kvcdn.errors import CorruptError

if TYPE_CHECKING:
    from kvcdn.block import BlockHeader
    from kvcdn.manifest import Manifest
    from kvcdn.signing import TrustList

SHORT = 12
"""Digits of an address in a table."""


def inspect_object(
    target: Annotated[str, typer.Argument(help="An object's address, its key, or a file that holds it.")],
    origin: Origin = None,
    endpoint: Endpoint = None,
    trust: TrustFile = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a manifest or a block: its model, tokens, sizes, producer and publisher. The signature is checked."""
    from kvcdn.block import open_header  # noqa: PLC0415 - see kvcdn.cli
    from kvcdn.envelope import MANIFEST_MAGIC, MAX_ENVELOPE_BYTES  # noqa: PLC0415
    from kvcdn.manifest import MAX_MANIFEST_BYTES, open_manifest  # noqa: PLC0415
    from kvcdn.origin.upkeep.catalog import find_object  # noqa: PLC0415

    trusted = trust_list(trust)
    path = Path(target)
    if path.is_file():
        where, total = str(path), path.stat().st_size
        with path.open("rb") as file:
            data = file.read(MAX_ENVELOPE_BYTES)
    else:
        store = open_origin(origin, endpoint)
        info = find_object(store, target)
        where, total = info.key, info.size
        data = store.read(where, 0, MAX_ENVELOPE_BYTES)
    if data.startswith(MANIFEST_MAGIC):
        if total > MAX_MANIFEST_BYTES:
            raise CorruptError(f"{where}: {total} bytes are more than a manifest can have")
        manifest = open_manifest(data, where)
        described = describe_manifest(manifest, trusted)
        described["block_addresses"] = [str(block.address) for block in manifest.blocks]
    else:
        described = _describe_block(open_header(data, where), total, trusted)
    if as_json:
        print_json({"object": where, **described})
    else:
        print_pairs([("object", where), *((key.replace("_", " "), shown(key, value)) for key, value in described.items())])


def describe_manifest(manifest: Manifest, trust: TrustList) -> dict[str, Any]:
    """What a manifest says, in the words of --json."""
    return {
        "type": "manifest",
        "address": str(manifest.address),
        "model": manifest.model_name,
        "model_tag": str(manifest.tag),
        "fingerprint": str(manifest.fingerprint),
        "precision": manifest.precision,
        "certificate": manifest.certificate.to_json() if manifest.certificate else None,
        "tokens": manifest.tokens,
        "blocks": len(manifest.blocks),
        "block_tokens": manifest.layout.block_tokens,
        "raw_bytes": manifest.raw_bytes,
        "stored_bytes": manifest.stored_bytes,
        "created": manifest.created,
        "expires": manifest.expires,
        "label": manifest.label,
        "producer": manifest.producer.to_json(),
        "publisher": manifest.publisher.text if manifest.publisher else None,
        "trusted": manifest.publisher in trust.names,
    }


def _describe_block(header: BlockHeader, total: int, trust: TrustList) -> dict[str, Any]:
    return {
        "type": "block",
        "address": str(header.address),
        "model_tag": str(header.model),
        "precision": header.precision,
        "certificate": header.certificate.to_json() if header.certificate else None,
        "start": header.start,
        "tokens": header.tokens,
        "layers": len(header.segments),
        "codecs": sorted({part.codec for segment in header.segments for part in segment.parts}),
        "raw_bytes": header.raw_bytes,
        "stored_bytes": total,
        "complete": total == header.size,
        "producer": header.producer.to_json(),
        "publisher": header.publisher.text,
        "trusted": header.publisher in trust.names,
    }


def shown(key: str, value: Any) -> str:
    """A value of a description, for people."""
    if isinstance(value, int):
        return _shown_integer(key, value)
    if isinstance(value, dict):
        return (
            str(Certificate(**value)) if key == "certificate" else ", ".join(f"{name} {item}" for name, item in value.items())
        )
    if isinstance(value, list):
        return ", ".join(str(item)[:SHORT] for item in value)
    return str(value or "-")


def _shown_integer(key: str, value: int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes"):
        return f"{size(value)} ({value:,})"
    return day(value) if key in ("created", "expires") else f"{value:,}"


def day(unix: int) -> str:
    """A date, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(unix))
