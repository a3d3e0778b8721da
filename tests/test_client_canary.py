"""The canary: it sees a model or a publisher that is not what it says, and lets every right one pass."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from kvcdn.block import open_header, seal_block
from kvcdn.client import Client, MissReason
from kvcdn.client.sources.stored import StoreSource
from kvcdn.errors import MismatchError, UsageError
from kvcdn.keys import Namespace, PrefixNames, block_key
from kvcdn.model.load import bind_model
from kvcdn.model.prefill import ScheduledPrefill, tensor_bytes
from kvcdn.model.recompute import Span, compare_span
from kvcdn.model.tokens import Prompt
from kvcdn.model.weights import sample_weights
from kvcdn.origin.publishing.publish import Publisher
from kvcdn.signing import SigningKey
from kvcdn.stores.memory import MemoryStore
from support.published import QUESTION, asked, publish_text, short_blocks
from support.tiny import tiny_checkpoint

TOKENS = 3 * 64 + 20
GREEDY = {"max_new_tokens": 4, "do_sample": False}


pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp("model")), tokens=TOKENS)


def reseal(published, change, key=None):
    """The same document under the same addresses, each tensor of each block as `change(block, tensors)` makes it."""
    loaded, store = published.loaded, MemoryStore()
    names = PrefixNames.of(loaded.identity, Namespace.public(), published.token_ids)
    prefill = ScheduledPrefill(loaded.model, loaded.identity.layout, TOKENS)
    for name, block in zip(names.blocks, prefill.run(published.token_ids), strict=True):
        layers = [[bytes(tensor_bytes(t.contiguous())) for t in change(name.index, tensors)] for tensors in block.layers]
        pieces = seal_block(loaded.identity, name, loaded.producer, layers, key or published.key)
        store.create(block_key(loaded.identity.tag, name.address), pieces)
    return store


def perturbed(model):
    """All weights of one layer off by 5 % of their spread."""
    torch.manual_seed(3)
    for weight in model.model.layers[1].parameters():
        weight.data.add_(0.05 * torch.randn_like(weight) * weight.float().std().clamp_min(1e-2))


def scaled(model):
    for weight in model.model.layers[1].parameters():
        weight.data.mul_(1.05)


def other_rope(model):
    rope = model.model.rotary_emb
    rope.inv_freq = rope.inv_freq * 2.0 ** (-torch.arange(len(rope.inv_freq)) / len(rope.inv_freq))


def other_tune(model):
    torch.manual_seed(5)
    for weight in model.parameters():
        weight.data.add_(0.1 * torch.randn_like(weight) * weight.float().std().clamp_min(1e-2))


def other_dtype(model):
    model.half()


def a_hook(model):
    """As for steering: something is added to what a layer hands on."""
    torch.manual_seed(6)
    push = torch.randn(model.config.hidden_size, dtype=model.dtype)
    model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output + push)


def a_hook_before(model):
    model.model.layers[1].register_forward_pre_hook(lambda _module, inputs: (inputs[0] * -1, *inputs[1:]))


def another_forward(model):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states) + states


def a_layer_less(model):
    model.model.layers = model.model.layers[:-1]


def layers_in_another_order(model):
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))


def rope_scaled(model):
    model.model.rotary_emb.attention_scaling = 1.2


def another_epsilon(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 1.0


MODEL_FAULTS = {
    "a hook": a_hook,
    "a hook before a layer": a_hook_before,
    "another forward": another_forward,
    "a layer less": a_layer_less,
    "layers in another order": layers_in_another_order,
    "a scale of rope": rope_scaled,
    "another epsilon": another_epsilon,
    "one layer's weights off by 5 %": perturbed,
    "one layer's weights 5 % larger": scaled,
    "another rope base": other_rope,
    "another fine-tune under this name": other_tune,
    "another dtype": other_dtype,
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
@pytest.mark.parametrize("when", ["before the first use", "after it"])
def test_a_model_that_is_not_what_its_files_say_gets_no_cache(published, fault, when):
    """Whenever the model was changed in memory: the cache is refused, and the model answers by itself."""
    model = copy.deepcopy(published.loaded.model)
    with Client(model, published.loaded.tokenizer, StoreSource(published.store), trust=published.trust, mode="fetch") as client:
        if when == "after it":
            assert TOKENS == client.generate(asked(published), **GREEDY).report.tokens_reused
        MODEL_FAULTS[fault](model)
        answer = client.generate(asked(published), **GREEDY)
        again = client.generate(asked(published), **GREEDY)
    assert (0, MissReason.MISMATCH) == (answer.report.tokens_reused, answer.report.reason)
    ids = torch.tensor([asked(published).token_ids])
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert tuple(alone[0, ids.shape[1] :].tolist()) == answer.token_ids == again.token_ids
    # The second time nothing is loaded at all.
    assert (0, MissReason.UNTRUSTED) == (again.report.tokens_reused, again.report.reason)


@pytest.fixture
def changeable(published):
    """A copy of the model, and a client that has used a cache with it."""
    model = copy.deepcopy(published.loaded.model)
    with Client(model, published.loaded.tokenizer, StoreSource(published.store), trust=published.trust, mode="fetch") as client:
        assert TOKENS == client.generate(asked(published), **GREEDY).report.tokens_reused
        yield model, client


@contextlib.contextmanager
def training(model):
    yield model.train()


@contextlib.contextmanager
def another_window(model):
    model.config.attention_chunk_size = 8
    yield


@contextlib.contextmanager
def another_rope_in_the_configuration(model):
    model.config.rope_parameters["rope_theta"] = 5e5
    yield


@contextlib.contextmanager
def more_tokens(model):
    yield model.resize_token_embeddings(2000)


@contextlib.contextmanager
def autocast(_model):
    with torch.autocast("cpu", torch.float16):
        yield


SETTINGS = {
    "training": (training, "training mode"),
    "another window": (another_window, "attention_chunk_size = 8, it was bound with None"),
    "another rope": (another_rope_in_the_configuration, "rope_theta"),
    "more tokens": (more_tokens, "vocab_size = 2000"),
    "autocast": (autocast, "autocast has a model of torch.bfloat16 compute in torch.float16"),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_a_model_that_was_set_otherwise_gets_no_cache(published, changeable, change):
    """Each is named, and the model answers by itself; a prefix in memory and a prepared cache are no way around it."""
    model, client = changeable
    change, named = SETTINGS[change]
    prompt, ids = asked(published), torch.tensor([asked(published).token_ids])
    prefix, prepared = client.prefix(Prompt(published.token_ids)), client.prepare(prompt)
    with change(model):
        answer = client.generate(prompt, **GREEDY)
        assert (0, MissReason.UNSUPPORTED_MODEL) == (answer.report.tokens_reused, answer.report.reason)
        assert named in answer.report.detail
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        assert tuple(alone[0, ids.shape[1] :].tolist()) == answer.token_ids
        answer = prefix.generate(prompt, **GREEDY)
        assert (0, MissReason.UNSUPPORTED_MODEL) == (answer.report.tokens_reused, answer.report.reason)
        with pytest.raises(UsageError, match="the model was changed after the cache was prepared"):
            model.generate(**prepared.inputs(), **GREEDY)


@pytest.mark.parametrize("fault", ["a hook", "another forward", "one layer's weights 5 % larger", "a scale of rope"])
def test_a_prepared_cache_is_not_used_with_a_model_that_was_changed_since(published, changeable, fault):
    """What was right when it was prepared would be wrong now."""
    model, client = changeable
    prepared = client.prepare(asked(published))
    MODEL_FAULTS[fault](model)
    with pytest.raises(UsageError, match="the model was changed after the cache was prepared: its weights"):
        model.generate(**prepared.inputs(), **GREEDY)


def a_number(model, _stack):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 5.0


def a_hook_of_all_modules(_model, stack):
    stack.callback(register_module_forward_hook(lambda module, _, output: None if module else output).remove)


def a_function_of_the_library(_model, stack):
    """As kernels are put in place of the library's."""
    rotate = modeling_llama.rotate_half
    stack.callback(setattr, modeling_llama, "rotate_half", rotate)

    def patched(states):
        return rotate(states)

    modeling_llama.rotate_half = patched


def another_attention(model, _stack):
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("of_a_test", lambda *args, **named: (sdpa(*args, **named)[0] * 1.2, None))
    model.set_attn_implementation("of_a_test")


@pytest.mark.parametrize("change", [a_number, a_hook_of_all_modules, a_function_of_the_library, another_attention])
def test_what_is_in_memory_is_not_used_after_changes_that_weights_do_not_show(published, changeable, change):
    """A prefix computes its own, a prepared cache is refused; and the canary decides anew whether a model is right."""
    model, client = changeable
    prompt, prepared = asked(published), client.prepare(asked(published))
    with contextlib.ExitStack() as stack, client.prefix(Prompt(published.token_ids, (TOKENS,))) as prefix:
        assert TOKENS == prefix.generate(prompt, **GREEDY).report.tokens_kept
        change(model, stack)
        assert 0 == prefix.generate(prompt, **GREEDY).report.tokens_kept
        with pytest.raises(UsageError, match="the model was changed after the cache was prepared"):
            model.generate(**prepared.inputs(), **GREEDY)
        report = client.generate(prompt, **GREEDY).report
        assert report.reason is MissReason.MISMATCH or "canary" in report.seconds


def test_beside_a_hook_that_does_something_else_later_each_prompt_has_a_canary(published, changeable):
    """It was there when the cache was first used, and did nothing then."""
    model, client = changeable
    pushed = []
    model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output + sum(pushed) if pushed else None)
    for _ in range(2):
        report = client.generate(asked(published), **GREEDY).report
        assert (TOKENS, True) == (report.tokens_reused, "canary" in report.seconds)
    torch.manual_seed(6)
    pushed.append(torch.randn(model.config.hidden_size, dtype=model.dtype))
    report = client.generate(asked(published), **GREEDY).report
    assert (0, MissReason.MISMATCH) == (report.tokens_reused, report.reason)


def test_hooks_of_libraries_are_no_change(published, changeable):
    """Outputs that the library captures are what the model computes."""
    model, client = changeable
    state = sample_weights(model)
    ids = torch.tensor([published.token_ids[:8]])
    model(input_ids=ids, output_hidden_states=True)
    assert state == sample_weights(model)
    handle = model.register_forward_hook(lambda *_: None)
    assert state != sample_weights(model)
    handle.remove()
    assert state == sample_weights(model)
    assert TOKENS == client.generate(asked(published), **GREEDY).report.tokens_reused


def swapped(_block, tensors):
    return tensors[::-1]


def shifted(_block, tensors):
    return [tensor.roll(1, dims=0) for tensor in tensors]


def heads_swapped(_block, tensors):
    return [tensor.flip(1) for tensor in tensors]


def not_a_number(_block, tensors):
    return [torch.full_like(tensor, float("nan")) for tensor in tensors]


PUBLISHER_FAULTS = {"K and V": swapped, "positions": shifted, "heads": heads_swapped, "not a number": not_a_number}


@pytest.mark.parametrize("fault", PUBLISHER_FAULTS)
@pytest.mark.parametrize("way", ["generate", "prepare"])
def test_a_cache_laid_out_otherwise_is_refused(published, fault, way):
    """What a publisher, or this client, may have mixed up."""
    store = reseal(published, PUBLISHER_FAULTS[fault])
    with published.client(StoreSource(store), vouched=False) as client:
        if way == "generate":
            report = client.generate(asked(published), **GREEDY).report
        else:
            prepared = client.prepare(asked(published))
            assert prepared.cache is None
            report = prepared.report
    assert (0, MissReason.MISMATCH) == (report.tokens_reused, report.reason)
    names = PrefixNames.of(published.loaded.identity, Namespace.public(), published.token_ids)
    assert str(names.blocks[0].address) in report.detail


KINDS = (
    "llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_neox", "mistral-window", "gemma3_text", "gemma3n_text", "gpt_oss",
    "llama4_text", "deepseek_v32",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_right_models_of_every_kind_pass(tmp_path, kind):
    """The same kernel gives the same bits, or nearly; another one, in bf16, differs by rounding; both pass."""
    published = publish_text(tiny_checkpoint(tmp_path, kind), tokens=TOKENS)
    with published.client(vouched=False) as client:
        report = client.generate(asked(published), **GREEDY).report
        assert (TOKENS, None) == (report.tokens_reused, report.reason)
        assert 0 < report.seconds["canary"]
    other = "eager" if published.loaded.producer.attention != "eager" else "sdpa"
    if kind == "gpt_oss":
        return  # the library has one kernel for it on the CPU
    published.loaded.model.set_attn_implementation(other)
    with published.client(vouched=False) as client:
        report = client.prepare(asked(published)).report
    assert (TOKENS, None) == (report.tokens_reused, report.reason)
    assert "canary" in report.seconds


@pytest.mark.parametrize("precision", ["int8", "int4", "tc-high", "tc-medium", "tc-low", "tc-least"])
def test_lossy_precisions_are_not_taken_for_faults(published, monkeypatch, precision):
    """Their coding is allowed for, and only theirs; K and V mixed up are seen all the same, by canary and audit."""
    monkeypatch.undo()
    whole = publish_text(Path(published.loaded.model.config._name_or_path), tokens=1300)
    Publisher(whole.loaded, whole.store, whole.key).publish(whole.token_ids, precision=precision)
    prompt = Prompt((*whole.token_ids, *QUESTION), (1300,))
    with whole.client(vouched=False, precision=precision, audit=1.0, local_store=None) as client:
        report = client.generate(prompt, **GREEDY).report
        assert (1300, None, precision) == (report.tokens_reused, report.reason, report.precision)
        assert report.audit.passed
        assert "canary" in report.seconds
        # What was learnt of a lossy precision says nothing of the exact one.
        prepared = client.prepare(prompt)
        for layer in prepared.cache.layers:
            layer.storage[0], layer.storage[1] = layer.storage[1], layer.storage[0]
        found = compare_span(client.loaded, prepared.cache.layers, prompt.token_ids, Span(0, 16), precision)
        assert found.excess
    with whole.client(vouched=False, local_store=None) as client:
        assert "canary" in client.generate(prompt, **GREEDY).report.seconds


def test_another_kernel_is_compared_with_measured_rounding(published):
    """In bf16 another kernel is not the same to the bit, and is not taken for a fault."""
    loaded = bind_model(copy.deepcopy(published.loaded.model), published.loaded.tokenizer)
    prefill = ScheduledPrefill(loaded.model, loaded.identity.layout, TOKENS)
    list(prefill.run(published.token_ids))
    loaded.model.set_attn_implementation("eager")
    found = compare_span(loaded, prefill._layers, published.token_ids, Span(128, 192))
    assert (False, "") == (found.identical, found.excess)
    assert 1e-3 < found.worst < 0.05


def test_what_passed_is_remembered_for_the_model_as_it_is(published):
    """In this process and on disk: no second canary, until a weight changes."""
    with published.client(vouched=False) as client:
        assert "canary" in client.generate(asked(published), **GREEDY).report.seconds
        assert "canary" not in client.generate(asked(published), **GREEDY).report.seconds
    with published.client(vouched=False) as client:
        assert "canary" not in client.generate(asked(published), **GREEDY).report.seconds
    model = copy.deepcopy(published.loaded.model)
    with Client(model, published.loaded.tokenizer, StoreSource(published.store), trust=published.trust, mode="fetch") as client:
        assert "canary" not in client.generate(asked(published), **GREEDY).report.seconds
        # In the noise of bf16, but a change: looked at again.
        model.model.norm.weight.data.mul_(1.01)
        assert "canary" in client.generate(asked(published), **GREEDY).report.seconds


def test_each_publisher_of_a_prefix_is_tried(published):
    """A second publisher's blocks behind the first one's are not covered by the first one's good name."""
    thief = SigningKey.generate()
    good, bad = published.store, reseal(published, shifted, thief)
    mixed = MemoryStore()
    keys = sorted((info.key for info in bad.list("v1/")), key=lambda key: open_header(bad.read(key), key).start)
    for index, key in enumerate(keys):
        mixed.create(key, [(bad if index >= 2 else good).read(key)])
    trust = dataclasses.replace(published.trust, names={published.key.public: "", thief.public: ""})
    with published.client(StoreSource(mixed), trust=trust) as client:
        report = client.generate(asked(published), **GREEDY).report
    assert (0, MissReason.MISMATCH) == (report.tokens_reused, report.reason)
    assert thief.public.text in report.detail


def test_a_layer_refuses_states_of_another_dtype(published):
    """Writing them would round them, unseen."""
    with published.client() as client:
        prepared = client.prepare(asked(published))
    layer = prepared.cache.layers[0]
    states = layer.keys[:, :, :1].float()
    with pytest.raises(MismatchError, match="float32"):
        layer.update(states, states)
