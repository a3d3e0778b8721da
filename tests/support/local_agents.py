"""Agents of one host, each a process: `local_agents.py CHECKPOINT TEXT STORE PUBLISHER URL=COUNT...`, a JSON line for each.

COUNT agents ask at once, each with a client of its own on the store; when all are done, those of the next URL do. They tell
what they were answered, from where, and how much of the mapped file they have changed for themselves. They are forked from a
process that has loaded the model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from kvcdn.client import Client
from kvcdn.model.load import LoadedModel, load_model
from kvcdn.signing import PublicKey, TrustList
from kvcdn.stores.local import LocalStore

QUESTION = "What may a licensee do?"

TOKENS = 4


def mapped_bytes(folder: Path) -> dict[str, int]:
    """Sums over this process's mappings of files in `folder`, in bytes."""
    totals = {"Rss": 0, "Anonymous": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        words = line.split()
        if "-" in words[0]:
            inside = str(folder) in line
        elif inside and words[0].rstrip(":") in totals:
            totals[words[0].rstrip(":")] += int(words[1]) * 1024
    return totals


def ask(loaded: LoadedModel, arguments: list[str]) -> dict[str, object]:
    """One agent's question."""
    checkpoint, text, folder, publisher, url = arguments
    store, trust = LocalStore(Path(folder)), TrustList.of(PublicKey.from_text(publisher))
    options = {"checkpoint": checkpoint, "trust": trust, "local_store": store, "mode": "fetch"}
    with Client(loaded.model, loaded.tokenizer, url, **options) as client:
        document = Path(text).read_text("utf-8")
        prepared = client.prepare(client.question(document, QUESTION))
        output = client.model.generate(**prepared.inputs(), max_new_tokens=TOKENS, do_sample=False)
        mapped = mapped_bytes(Path(folder))
    return {"url": url, "tokens": output[0, -TOKENS:].tolist(), "local": prepared.report.tokens_local, "mapped": mapped}


def main() -> None:
    """Forks the agents, then waits for them."""
    torch.set_num_threads(1)
    loaded = load_model(sys.argv[1])
    for word in sys.argv[5:]:
        url, _, count = word.partition("=")
        children = []
        for _ in range(int(count)):
            child = os.fork()
            if not child:
                line = json.dumps(ask(loaded, [*sys.argv[1:5], url]))
                os.write(1, line.encode() + b"\n")
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(1)


if __name__ == "__main__":
    main()
