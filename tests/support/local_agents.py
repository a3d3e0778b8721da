"""Agents of one host, each a process: `local_agents.py CHECKPOINT TEXT STORE PUBLISHER URL=COUNT...`, a JSON line for each.

COUNT agents ask at once; when all are done, those of the next URL do. They tell what they were answered, from where, and how
much of the mapped file they have changed for themselves. They are forked from a process that has loaded the model and made a
client, but has not used it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from kvcdn.client import Client
from kvcdn.keys import PRECISION_NATIVE
from kvcdn.model.load import load_model
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


def ask(client: Client, url: str, text: str) -> dict[str, object]:
    """One agent's question."""
    prepared = client.prepare(client.question(Path(text).read_text("utf-8"), QUESTION))
    output = client.model.generate(**prepared.inputs(), max_new_tokens=TOKENS, do_sample=False)
    mapped = mapped_bytes(client._local.store.folder)
    client.close()
    return {"url": url, "tokens": output[0, -TOKENS:].tolist(), "local": prepared.report.tokens_local, "mapped": mapped}


def main() -> None:
    """Forks the agents, then waits for them."""
    checkpoint, text, folder, publisher, *agents = sys.argv[1:]
    torch.set_num_threads(1)
    loaded, key = load_model(checkpoint), PublicKey.from_text(publisher)
    for word in agents:
        url, _, count = word.partition("=")
        options = {
            "checkpoint": checkpoint,
            "trust": TrustList.of(key),
            "local_store": LocalStore(Path(folder)),
            "mode": "fetch",
        }
        client = Client(loaded.model, loaded.tokenizer, url, **options)
        client._supply.gate._canary.vouch({(key, PRECISION_NATIVE)})
        children = []
        for _ in range(int(count)):
            child = os.fork()
            if not child:
                os.write(1, json.dumps(ask(client, url, text)).encode() + b"\n")
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(1)


if __name__ == "__main__":
    main()
