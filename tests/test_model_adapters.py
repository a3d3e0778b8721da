"""LoRA adapters are part of what a KV is bound to: no cache of one is ever used for another, or for the model without."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftMixedModel,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kvcdn.cli.main import app
from kvcdn.client import Client
from kvcdn.client.loading.report import MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.client.verify import verify_prefix
from kvcdn.errors import CorruptError, NotFoundError, UnsupportedModelError, UsageError
from kvcdn.model.adapters import adapter_state
from kvcdn.model.fingerprint import fingerprint_adapter, fingerprint_checkpoint
from kvcdn.model.load import bind_model, load_model
from kvcdn.model.prefill import ScheduledPrefill
from kvcdn.model.tokens import Prompt
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.signing import SigningKey, TrustList
from kvcdn.stores.memory import MemoryStore
from support.lora import tiny_adapter
from support.tiny import TEXT, tiny_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`:FutureWarning"),
]
"""peft asks transformers in ways that transformers is about to drop."""

IDS = tuple(range(2, 72))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, tiny_llama):
    """Two adapters, and one that replaces a whole module besides."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": tiny_adapter(folder / "one", tiny_llama, seed=1),
        "two": tiny_adapter(folder / "two", tiny_llama, seed=2, use_rslora=True, rank_pattern={"q_proj": 2}),
        "saved": tiny_adapter(folder / "saved", tiny_llama, seed=3, modules_to_save=["norm", "k_proj"]),
    }


@pytest.fixture
def plain(tiny_llama):
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype="auto").eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return load_model(str(tiny_llama)).tokenizer


def with_adapters(model, folders):
    """The model with adapters by name, all loaded, the first active."""
    wrapper = None
    for name, folder in folders.items():
        if wrapper is None:
            wrapper = PeftModel.from_pretrained(model, folder, adapter_name=name)
        else:
            wrapper.load_adapter(folder, adapter_name=name)
    return wrapper.eval()


def kv(loaded):
    """The KV of some tokens, as bytes."""
    blocks = ScheduledPrefill(loaded.model, loaded.identity.layout, len(IDS)).run(IDS)
    return b"".join(bytes(tensor) for block in blocks for layer in block.raw_layers() for tensor in layer)


def states(wrapper):
    """Everything a model with two adapters can be switched to, by name."""
    base = wrapper.base_model
    yield "one", lambda: wrapper.set_adapter("one")
    yield "two", lambda: wrapper.set_adapter("two")
    yield "one then two", lambda: base.set_adapter(["one", "two"])
    yield "two then one", lambda: base.set_adapter(["two", "one"])
    yield "disabled", wrapper.base_model.disable_adapter_layers
    yield "one again", lambda: (base.enable_adapter_layers(), wrapper.set_adapter("one"))
    yield "one merged", lambda: wrapper.merge_adapter(["one"])


def test_every_state_of_the_adapters_has_its_own_fingerprint_and_kv(plain, tokenizer, tiny_llama, adapters):
    """Base, each adapter, both in either order, and merged: equal fingerprints exactly where the KV is of one state."""
    wrapper = with_adapters(plain, {"one": adapters["one"], "two": adapters["two"]})
    loaded = bind_model(wrapper, tokenizer, adapters={"one": adapters["one"], "two": adapters["two"]})
    found = {}
    for name, switch in states(wrapper):
        switch()
        loaded = loaded.current()
        found[name] = (loaded.identity.fingerprint, kv(loaded))
    assert fingerprint_checkpoint(tiny_llama) == found["disabled"][0]
    assert kv(load_model(str(tiny_llama))) == found["disabled"][1]
    assert found.pop("one") == found.pop("one again")
    fingerprints = {fingerprint for fingerprint, _ in found.values()}
    assert len(found) == len(fingerprints)
    # The order in which rounded sums are added decides bits; where it did not, a miss more would be no harm.
    assert len(found) - 1 <= len({tensors for _, tensors in found.values()})


@pytest.mark.parametrize("chosen", [("one",), ("two", "one"), ("saved",)])
def test_the_same_adapters_have_the_same_fingerprint_however_they_were_loaded(plain, tokenizer, tiny_llama, adapters, chosen):
    """By name in a model of peft, or by folder: what counts is what is applied."""
    folders = {name: adapters[name] for name in chosen}
    wrapper = with_adapters(plain, folders)
    wrapper.base_model.set_adapter(list(chosen))
    bound = bind_model(wrapper, tokenizer, adapters=folders)
    loaded = load_model(str(tiny_llama), adapters=list(folders.values()))
    assert loaded.identity == bound.identity
    assert kv(loaded) == kv(bound)
    assert kv(load_model(str(tiny_llama))) != kv(loaded)


def published(tiny_llama, tokenizer, store, key, folders):
    loaded = load_model(str(tiny_llama), adapters=folders)
    ids = tuple(tokenizer(TEXT)["input_ids"][:300])
    Publisher(loaded, store, key).publish(ids)
    return ids


def test_a_published_kv_is_used_for_its_own_adapter_only(plain, tokenizer, tiny_llama, adapters):
    """A client whose model switches between adapters hits with the one that published, to the bit, and misses with all else."""
    store, key = MemoryStore(), SigningKey.generate()
    ids = published(tiny_llama, tokenizer, store, key, [adapters["one"]])
    folders = {"one": adapters["one"], "two": adapters["two"]}
    wrapper = with_adapters(plain, folders)
    client = Client(wrapper, tokenizer, StoreSource(store), adapters=folders, trust=TrustList.of(key.public), mode="fetch")
    prompt = Prompt((*ids, 5, 6, 7), (len(ids),))
    hits = {}
    for name, switch in states(wrapper):
        switch()
        report = client.prepare(prompt).report
        hits[name] = report.tokens_reused
        assert (None if report.tokens_reused else MissReason.NOT_PUBLISHED) == report.reason
    assert {"one", "one again"} == {name for name, reused in hits.items() if reused == len(ids)}
    assert {0, len(ids)} == set(hits.values())
    fresh = Client.load(
        str(tiny_llama), StoreSource(store), adapters=[adapters["one"]], trust=TrustList.of(key.public), mode="fetch"
    )
    found = verify_prefix(fresh, ids, greedy=2)
    assert (True, True) == (found.sound, found.bit_identical)


def test_new_weights_under_an_old_name_are_another_fingerprint(tmp_path, tiny_llama, adapters):
    """A folder that was trained on: the name says nothing."""
    folder = shutil.copytree(adapters["one"], tmp_path / "one")
    assert fingerprint_adapter(adapters["one"]) == fingerprint_adapter(folder)
    tiny_adapter(folder, tiny_llama, seed=9)
    assert fingerprint_adapter(adapters["one"]) != fingerprint_adapter(folder)


CHANGES = {
    "scale": ("lora_alpha", 9, False),
    "rank-stabilised": ("use_rslora", True, False),
    "decomposed": ("use_dora", True, False),
    "targets": ("target_modules", ["q_proj"], False),
    "scale of some layers": ("alpha_pattern", {"q_proj": 3}, False),
    "order of targets": ("target_modules", ["down_proj", "q_proj", "v_proj"], True),
    "dropout": ("lora_dropout", 0.5, True),
    "base model's name": ("base_model_name_or_path", "elsewhere", True),
    "a setting of a later version, unset": ("not_yet", None, True),
    "a setting of a later version, set": ("not_yet", 1, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_the_kv_counts(tmp_path, adapters, change):
    """Of an adapter's configuration everything but what cannot matter."""
    key, value, same = CHANGES[change]
    folder = shutil.copytree(adapters["one"], tmp_path / "one")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert same == (fingerprint_adapter(adapters["one"]) == fingerprint_adapter(folder))


def test_an_adapter_that_is_not_in_its_folder_is_refused(plain, tokenizer, adapters):
    """Never saved, saved elsewhere, or changed since: what is in memory is compared with the files."""
    wrapper = with_adapters(plain, {"one": adapters["one"]})
    with pytest.raises(UnsupportedModelError, match="nothing says which files"):
        bind_model(wrapper, tokenizer)
    with pytest.raises(UnsupportedModelError, match=r"use_rslora|rank_pattern"):
        bind_model(wrapper, tokenizer, adapters={"one": adapters["two"]})
    loaded = bind_model(wrapper, tokenizer, adapters={"one": adapters["one"]})
    tensor = next(tensor for name, tensor in wrapper.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        tensor[0, 0] += 1
    with pytest.raises(UnsupportedModelError, match=r"lora_B.*differs"):
        loaded.current()


def test_a_new_adapter_in_memory_is_refused(plain, tokenizer):
    """One that was only made, not loaded."""
    wrapper = get_peft_model(plain, LoraConfig(target_modules=["q_proj"])).eval()
    with pytest.raises(UnsupportedModelError, match=r"'default'.*which files"):
        bind_model(wrapper, tokenizer)
    with wrapper.disable_adapter():
        bind_model(wrapper, tokenizer)


@pytest.mark.parametrize("how", ["scaled", "half merged", "half active", "merged and disabled", "half disabled"])
def test_a_state_that_no_fingerprint_tells_is_refused(plain, tokenizer, adapters, how):
    """Layers that disagree, or a scale that no file knows."""
    wrapper = with_adapters(plain, {"one": adapters["one"], "two": adapters["two"]})
    loaded = bind_model(wrapper, tokenizer, adapters={"one": adapters["one"], "two": adapters["two"]})
    layer = wrapper.base_model.model.model.layers[0].self_attn.q_proj
    match how:
        case "scaled":
            layer.set_scale("one", 0.5)
        case "half merged":
            layer.merge()
        case "half active":
            layer.set_adapter("two")
        case "merged and disabled":
            wrapper.merge_adapter()
            wrapper.base_model.disable_adapter_layers()
        case "half disabled":
            layer.enable_adapters(False)
    with pytest.raises(UnsupportedModelError):
        loaded.current()


VARIANTS = {
    "decomposed": ("llama", {"use_dora": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "the head": ("llama", {"target_modules": ["lm_head", "k_proj"]}),
    "embeddings and head saved whole": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "biases of its own": ("llama", {"lora_bias": True}),
    "some layers": ("llama", {"layers_to_transform": [1]}),
    "ranks and scales by layer": ("llama", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "transposed weights": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "windows": ("gemma3_text", {"target_modules": "all-linear"}),
    "latents": ("deepseek_v3", {"target_modules": "all-linear"}),
    "states": ("qwen3_next", {"target_modules": "all-linear"}),
    "parameters of experts": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_every_variant_of_lora_is_carried_to_the_bit(tmp_path, variant):
    """Published with the adapter; read by a model of peft, whose continuations are its own."""
    kind, config = VARIANTS[variant]
    checkpoint = tiny_checkpoint(tmp_path / "model", kind)
    adapter = tiny_adapter(tmp_path / "adapter", checkpoint, **config)
    store, key = MemoryStore(), SigningKey.generate()
    publisher = load_model(str(checkpoint), adapters=[adapter])
    ids = tuple(publisher.tokenizer(TEXT)["input_ids"][:150])
    Publisher(publisher, store, key).publish(ids)
    wrapper = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval(), adapter)
    with Client(
        wrapper,
        publisher.tokenizer,
        StoreSource(store),
        adapters={"default": adapter},
        trust=TrustList.of(key.public),
        mode="fetch",
    ) as client:
        found = verify_prefix(client, ids, greedy=3)
        assert (True, True) == (found.sound, found.bit_identical)
        with wrapper.disable_adapter():
            assert MissReason.NOT_PUBLISHED == client.prepare(Prompt((*ids, 5), (len(ids),))).report.reason


CHANGE_THE_BASE = {
    "trained biases": ("qwen2", {"bias": "all"}, r"bias in memory is not the one"),
    "principal components": ("llama", {"init_lora_weights": "pissa"}, "weight .* in memory is not the one"),
    "trained tokens": ("llama", {"trainable_token_indices": [5, 6]}, "TrainableTokensWrapper"),
}


@pytest.mark.parametrize("variant", CHANGE_THE_BASE)
def test_adapters_that_change_the_base_model_are_refused(tmp_path, variant):
    """Their base is none of the checkpoint's, also where they are disabled."""
    kind, config, named = CHANGE_THE_BASE[variant]
    checkpoint = tiny_checkpoint(tmp_path / "model", kind, dtype=torch.float32)
    adapter = tiny_adapter(tmp_path / "adapter", checkpoint, **config)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(str(checkpoint), adapters=[adapter])


@pytest.mark.parametrize("rows", ["two", "__base__"])
def test_rows_with_adapters_of_their_own_are_refused_beside_a_cache(plain, tokenizer, tiny_llama, adapters, rows):
    """peft's `adapter_names=` changes the adapters for one call, and no layer's state."""
    store, key = MemoryStore(), SigningKey.generate()
    ids = published(tiny_llama, tokenizer, store, key, [adapters["one"]])
    folders = {"one": adapters["one"], "two": adapters["two"]}
    wrapper = with_adapters(plain, folders)
    with Client(
        wrapper, tokenizer, StoreSource(store), adapters=folders, trust=TrustList.of(key.public), mode="fetch"
    ) as client:
        prepared = client.prepare(Prompt((*ids, 5, 6, 7), (len(ids),)))
        assert len(ids) == prepared.report.tokens_reused
        with pytest.raises(UsageError, match="adapter_names"):
            wrapper.generate(**prepared.inputs(), adapter_names=[rows], max_new_tokens=2, do_sample=False)
        with pytest.raises(UsageError, match="adapter_names"):
            client.generate(Prompt(ids), adapter_names=[rows])


@pytest.mark.parametrize("how", ["a trainable adapter", "dropout alone"])
def test_a_part_in_training_mode_is_refused(plain, tokenizer, tiny_llama, tmp_path, how):
    """A new adapter often is, in a model that is not: its dropout would make what is published random."""
    adapter = tiny_adapter(tmp_path / "dropping", tiny_llama, lora_dropout=0.5)
    wrapper = PeftModel.from_pretrained(plain, adapter, is_trainable=how == "a trainable adapter")
    if how == "dropout alone":
        bound = bind_model(wrapper, tokenizer, adapters={"default": adapter})
        for module in wrapper.modules():
            if isinstance(module, torch.nn.Dropout):
                module.train()
        with pytest.raises(UnsupportedModelError, match=r"lora_dropout.*in training mode"):
            bound.current()
    assert not plain.training
    with pytest.raises(UsageError, match=r"q_proj.*in training mode") as refused:
        bind_model(wrapper, tokenizer, adapters={"default": adapter})
    assert "eval()" in refused.value.hint
    bind_model(wrapper.eval(), tokenizer, adapters={"default": adapter})


def test_a_merged_and_unloaded_adapter_is_not_taken_for_the_base(plain, tokenizer, adapters):
    """The model looks like the base model then; its weights do not. Saved, it is a model of its own."""
    merged = with_adapters(plain, {"one": adapters["one"]}).merge_and_unload()
    assert () == adapter_state(merged).names
    with pytest.raises(UnsupportedModelError, match=r"the weight model\.layers\.0"):
        bind_model(merged, tokenizer)


OTHERS = {
    "IA3": lambda: IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    "PROMPT_TUNING": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "PREFIX_TUNING": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "VERA": lambda: VeraConfig(target_modules=["q_proj"]),
    "ADAPTION_PROMPT": lambda: AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2),
    "LN_TUNING": lambda: LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]),
    "TRAINABLE_TOKENS": lambda: TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[5]),
}


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.filterwarnings("ignore:Position ids are not supported", "ignore:Unsupported layer type")
def test_other_methods_of_peft_are_refused_by_name(plain, tokenizer, method):
    """And the client answers with such a model as it would alone."""
    wrapper = get_peft_model(plain, OTHERS[method]()).eval()
    with pytest.raises(UnsupportedModelError, match=method):
        bind_model(wrapper, tokenizer)
    client = Client(wrapper, tokenizer, StoreSource(MemoryStore()), trust=TrustList.of())
    answer = client.generate(Prompt(IDS, ()), max_new_tokens=2, do_sample=False)
    assert MissReason.UNSUPPORTED_MODEL == answer.report.reason
    ids = torch.tensor([IDS])
    expected = wrapper.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    assert tuple(expected[0, len(IDS) :].tolist()) == answer.token_ids


def test_methods_that_are_mixed_are_refused_by_name(plain, tokenizer, adapters):
    """Also where each is LoRA: their layers apply otherwise."""
    mixed = PeftMixedModel.from_pretrained(plain, str(adapters["one"])).eval()
    with pytest.raises(UnsupportedModelError, match="PeftMixedModel"):
        bind_model(mixed, tokenizer, adapters={"default": adapters["one"]})


def test_a_folder_that_is_no_adapter_is_named(tmp_path, tiny_llama, adapters):
    """Missing, of another method, a variant whose KV depends on more, or with pickled weights."""
    with pytest.raises(NotFoundError, match=r"adapter_config\.json"):
        load_model(str(tiny_llama), adapters=[tmp_path])
    folder = shutil.copytree(adapters["one"], tmp_path / "one")
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, named in (({"peft_type": "LOHA"}, "LOHA"), ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens")):
        (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UnsupportedModelError, match=named):
            load_model(str(tiny_llama), adapters=[folder])
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CorruptError):
        load_model(str(tiny_llama), adapters=[folder])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"adapter_model\.safetensors"):
        load_model(str(tiny_llama), adapters=[folder])


def test_adapters_on_the_command_line(tmp_path, tiny_llama, adapters):
    """`publish --adapter`, `ask --adapter` and `verify --adapter` meet each other, and nobody else."""
    text = tmp_path / "document.txt"
    text.write_text(TEXT[:600])
    common = ["--model", str(tiny_llama), "--origin", str(tmp_path / "origin"), "--json"]
    adapter = ["--adapter", str(adapters["one"])]

    def run(*arguments):
        return CliRunner().invoke(app, [*arguments, *common])

    def ask(*chosen):
        return json.loads(run("ask", str(text), "Why?", *chosen, "--max-tokens", "2", "--mode", "fetch").stdout)["report"]

    assert "published" == json.loads(run("publish", str(text), *adapter).stdout)["status"]
    assert json.loads(run("verify", str(text), *adapter).stdout)["bit_identical"]
    assert ask(*adapter)["tokens_reused"] > 0
    other = ["--adapter", str(adapters["two"])]
    for alone in ([], other, [*adapter, *other]):
        assert 0 == ask(*alone)["tokens_reused"]
        assert NotFoundError is type(run("verify", str(text), *alone).exception)
