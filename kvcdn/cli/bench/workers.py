"""Documents through a prefill service with one worker of one thread, and with several: by how much they are done sooner."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcdn.cli.bench.machine import machine, spread
from kvcdn.cli.rig import document_text
from kvcdn.errors import UsageError
from kvcdn.model.checkpoint import resolve_checkpoint
from kvcdn.model.identity import load_tokenizer
from kvcdn.origin.jobs.jobs import JobRequest
from kvcdn.origin.jobs.queue import JobQueue
from kvcdn.origin.service.serve import serving
from kvcdn.origin.service.service_settings import ServiceSettings
from kvcdn.signing import SigningKey

Tell = Callable[[str], None]

LOOK_SECONDS = 0.02

START_SECONDS = 600.0
"""For all workers to hold the model: on a busy machine their imports alone take a minute."""


def measure_workers(
    model: str, documents: int, tokens: int, workers: int, executor: str, rounds: int, tell: Tell
) -> dict[str, Any]:
    """Seconds for `documents` documents of `tokens` tokens, medians of rounds in which both kinds take turns at being first.

    One worker is a process of this machine, `workers` are of the `executor`. All hold the model before time is taken. Raises
    UsageError where there is not enough text.
    """
    texts = _texts(model, documents, tokens)
    seconds: dict[int, list[float]] = {1: [], workers: []}
    with tempfile.TemporaryDirectory(prefix="kvcdn-workers-") as folder:
        # For the processes that are started: one thread each, and nothing of the user's.
        os.environ |= {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": f"{folder}/config"}
        key = Path(folder) / "key.pem"
        key.touch(mode=0o600)
        key.write_bytes(SigningKey.generate().to_pem())
        for number in range(rounds):
            for count in (1, workers) if number % 2 else (workers, 1):
                settings = ServiceSettings.model_validate(
                    {
                        "models": (model,),
                        "origin": f"{folder}/{number}-{count}",
                        "listen": "127.0.0.1:0",
                        "queue_file": f"{folder}/{number}-{count}.sqlite",
                        "key_file": key,
                        "workers": count,
                        "executor": "processes" if count == 1 else executor,
                    }
                )
                Path(settings.origin or "").mkdir()
                seconds[count].append(asyncio.run(_time(settings, texts)))
                tell(f"round {number + 1}, {count} workers: {documents} documents in {seconds[count][-1]:.2f} s")
    one, several = (statistics.median(seconds[count]) for count in (1, workers))
    return {
        "model": model,
        "executor": executor,
        "documents": documents,
        "tokens": tokens,
        "workers": workers,
        "rounds": rounds,
        "one_s": round(one, 3),
        "several_s": round(several, 3),
        "speedup": round(one / several, 3),
        "spread_s": {"one": spread(seconds[1]), "several": spread(seconds[workers])},
        "machine": machine(),
    }


def _texts(model: str, documents: int, tokens: int) -> list[str]:
    """Texts that share no beginning, of so many tokens each."""
    tokenizer = load_tokenizer(resolve_checkpoint(model).folder)
    text = document_text(None)
    offsets = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    step = (len(offsets) - tokens) // documents
    if step < 1:
        raise UsageError(f"the text of this machine is too short for {documents} documents of {tokens:,} tokens")
    return [text[offsets[n * step][0] : offsets[n * step + tokens - 1][1]] for n in range(documents)]


async def _time(settings: ServiceSettings, texts: list[str]) -> float:
    async with serving(settings):
        queue = settings.open_queue()
        try:
            await _warm(queue, settings.workers)
            before = queue.counts().get("published", 0)
            began = time.perf_counter()
            queue.accept([("bench", JobRequest(text=text)) for text in texts])
            while queue.counts().get("published", 0) < before + len(texts):  # noqa: ASYNC110 - other processes publish
                await asyncio.sleep(LOOK_SECONDS)
            return time.perf_counter() - began
        finally:
            queue.close()


async def _warm(queue: JobQueue, workers: int) -> None:
    """Returns when each worker has had a job, and none has one."""
    deadline = time.monotonic() + START_SECONDS
    number, all_at_once = 0, False
    while not all_at_once or queue.counts().get("running") or queue.counts().get("queued"):
        if time.monotonic() > deadline:
            raise UsageError(f"the workers were not ready within {START_SECONDS:.0f} s", hint="look at what they say above")
        if not all_at_once and not queue.counts().get("queued"):
            number += 1
            queue.accept([("bench", JobRequest(text=f"{number}. Each worker loads the model for its first document."))])
        all_at_once = all_at_once or queue.counts().get("running") == workers
        await asyncio.sleep(LOOK_SECONDS)
