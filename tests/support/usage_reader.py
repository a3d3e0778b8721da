"""A client to be killed: `usage_reader.py CHECKPOINT LEDGER KEY DOCUMENT` asks once, through the edge that a line names."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kvcdn.client import Client
from kvcdn.model.load import load_model
from kvcdn.signing import PublicKey, TrustList


def main() -> None:
    """Loads the model, waits for the edge's URL, and asks; says when it ends."""
    checkpoint, ledger, key, document = sys.argv[1:]
    torch.set_num_threads(1)
    loaded = load_model(checkpoint)
    text, trust = Path(document).read_text("utf-8"), TrustList.of(PublicKey.from_text(key))
    edge = sys.stdin.readline().strip()
    with Client(loaded.model, loaded.tokenizer, edge, trust=trust, mode="fetch", usage=ledger, local_store=None) as client:
        client.ask(text, "Why?", max_new_tokens=1)
    sys.stdout.write("end\n")


if __name__ == "__main__":
    main()
