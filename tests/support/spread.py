"""A model spread over two devices beside the same on one: `spread.py KIND FOLDER DEVICES` writes what came of it, as JSON.

DEVICES are `sim`, those of `accelerators`, made known in this process alone, beside the CPU; or `cuda`. The hooks are
accelerate's own. With `lossy` for a KIND: the rows of lossy precisions, decoded for the CPU and for devices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model

from kvcdn.client import Client, MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.verify import verify_prefix
from kvcdn.model.load import LoadedModel, bind_model, load_model
from kvcdn.model.place import layer_devices
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.stores.local import LocalStore
from kvcdn.stores.memory import MemoryStore
from support.accelerators import install
from support.published import BLOCK, Published, asked, publish_text, short_blocks
from support.tiny import tiny_checkpoint

TOKENS = 3 * BLOCK + 20
LOSSY_TOKENS = 200
LOSSY = ("int8", "int4", "tc-low")

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def spread(checkpoint: str, devices: str) -> LoadedModel:
    """The model in `checkpoint`, its first layers on the first of the `devices`, the others on the second."""
    loaded = load_model(checkpoint)
    count = loaded.model.config.num_hidden_layers
    body = loaded.model.base_model_prefix
    places = {f"{body}.{name}": f"{devices}:0" for name, _ in getattr(loaded.model, body).named_children() if name != "layers"}
    places |= {f"{body}.layers.{number}": f"{devices}:{int(number >= count // 2)}" for number in range(count)}
    places |= {f"{body}.norm": f"{devices}:1", "lm_head": f"{devices}:0"}
    model = dispatch_model(loaded.model, places, main_device=f"{devices}:0")
    return bind_model(model, loaded.tokenizer, checkpoint)


def rows(layers: Any, tokens: int) -> list[list[torch.Tensor]]:
    """The rows of each layer that were read, on the CPU."""
    return [[tensor.cpu() for tensor in layer.rows(layer.first, tokens)] for layer in layers]


def same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for pair in zip(ours, theirs, strict=True)
        for one, other in zip(*pair, strict=True)
    )


def lossy(folder: Path, devices: str) -> dict[str, Any]:
    """Precisions whose arithmetic is done on the device: by model, whether all rows are those that a CPU makes of them."""
    checkpoint = tiny_checkpoint(folder / "model")
    published = publish_text(checkpoint, tokens=LOSSY_TOKENS)
    publisher = Publisher(published.loaded, published.store, published.key)
    for precision in LOSSY:
        publisher.publish(published.token_ids, precision=precision, progressive=precision == "int4")
    if devices == "sim":
        install()
    models = {"one": load_model(str(checkpoint), f"{devices}:0")}
    if devices == "sim" or torch.cuda.device_count() > 1:
        models["spread"] = spread(str(checkpoint), devices)
    found: dict[str, Any] = {}
    for name, loaded in models.items():
        found[name] = {}
        for precision in (*LOSSY, "int4+"):
            options = {"precision": precision, "local_store": None}
            other = Client(loaded.model, loaded.tokenizer, StoreSource(published.store), trust=published.trust, **options)
            with published.client(**options) as here, other as there:
                ours, theirs = (one.prepare(asked(published), mode="fetch") for one in (here, there))
                reused = [one.report.tokens_reused for one in (ours, theirs)]
                both = [rows(one.cache.layers, LOSSY_TOKENS) for one in (ours, theirs)]
                found[name][precision] = [*reused, same(*both), theirs.report.detail]
    return found


def answered(answer: Any) -> list[Any]:
    """What was answered behind how many tokens, and what went wrong; a race that computing has a part in did not."""
    report = answer.report
    wrong = "" if report.reason is MissReason.PLANNED else str(report.detail)
    return [answer.token_ids, report.tokens_reused + report.tokens_computed, wrong]


def main() -> None:
    kind, folder, devices = sys.argv[1:]
    torch.set_num_threads(1)
    if kind == "lossy":
        sys.stdout.write(json.dumps(lossy(Path(folder), devices)) + "\n")
        return
    home = "cpu" if devices == "sim" else "cuda:0"
    checkpoint = tiny_checkpoint(Path(folder) / "model", kind, dtype=torch.float32, strength=2)
    published = publish_text(checkpoint, tokens=TOKENS, device=home)
    whole, prompt = published.loaded, asked(published)
    ids = torch.tensor([prompt.token_ids], device=home)
    one_pass = tuple(whole.model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)[0, ids.shape[1] :].tolist())
    with published.client() as one:
        alone = one.generate(prompt, **OPTIONS).token_ids
    end = whole.identity.layout.document_end(TOKENS)
    if devices == "sim":
        install()
    parted = spread(str(checkpoint), devices)
    found: dict[str, Any] = {"identity": parted.identity == whole.identity, "alone": alone, "one pass": one_pass, "end": end}
    found["devices"] = [str(device) for device in layer_devices(parted.model, parted.identity.layout)]

    def client(**options: Any) -> Client:
        chosen = {"trust": published.trust, "local_store": None, "mode": "fetch", **options}
        return Client(parted.model, parted.tokenizer, StoreSource(published.store), **chosen)

    for mode in ("fetch", "compute", "both"):
        with client(mode=mode) as one:
            found[mode] = [answered(one.generate(prompt, **OPTIONS)) for _ in range(2)]
    with client(audit=1.0) as one:
        prepared = one.prepare(prompt)
        layers = [layer for layer in prepared.cache.layers if getattr(layer, "keys", None) is not None]
        found["lies on"] = [str(layer.keys.device) for layer in layers]
        found["audited"] = prepared.report.audit is not None and prepared.report.audit.passed
        found["batch"] = [answered(answer) for answer in one.generate_batch([prompt, prompt], **OPTIONS)]
        with one.stream(prompt, **OPTIONS) as stream:
            for _ in stream:
                pass
        found["stream"] = [answered(stream.answer)]
    with published.client() as theirs, client() as ours:
        pair = [one.prepare(prompt).cache.layers for one in (theirs, ours)]
        found["rows"] = same(*(rows(layers, end) for layers in pair))
    if not whole.identity.layout.state_bytes:
        store = LocalStore(Path(folder) / "store")
        for _ in range(2):
            with client(local_store=store) as one:
                answer = one.generate(prompt, **OPTIONS)
        found["local"], found["from here"] = [answered(answer)], answer.report.tokens_local
    with client() as one:
        checked = verify_prefix(one, published.token_ids, greedy=4)
        found["verified"] = [checked.loaded_equals_published, checked.bit_identical, checked.sound]
    again = MemoryStore()
    Publisher(parted, again, published.key).publish(published.token_ids)
    with Published(whole, again, published.key, published.text, published.token_ids, published.result).client() as one:
        found["published"] = [answered(one.generate(prompt, **OPTIONS))]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    with short_blocks():
        main()
