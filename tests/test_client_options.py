"""Options of generate(): each gives the model's own result beside a loaded cache, or is refused by name."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor
from transformers.generation import GenerationMixin

from kvcdn.client.options import OWNED, PASSES, REFUSED, check_options, options_table
from kvcdn.errors import UsageError
from kvcdn.model.cache import cache_argument
from kvcdn.model.tokens import Prompt
from support.published import QUESTION, publish_text, short_blocks
from support.stock import stock_cache
from support.tiny import tiny_checkpoint

TOKENS = 2 * 64 + 20
SIX = {"max_new_tokens": 6, "pad_token_id": 1}


pytestmark = pytest.mark.usefixtures("short_blocks")


def publish(tmp_path_factory, kind):
    with short_blocks():
        return publish_text(tiny_checkpoint(tmp_path_factory.mktemp(kind), kind, dtype=torch.float32), tokens=TOKENS)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """In float32, where answers do not hang on rounding."""
    return publish(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return publish(tmp_path_factory, "gemma3_text")


def asked(published):
    # The end repeats the beginning, so that there is something to look up, to repeat and to forbid.
    return Prompt((*published.token_ids, *QUESTION, *published.token_ids[:12]), (TOKENS,))


def alone(published, prompt, options, cache=None):
    """The sequences that the model writes without kvcdn, by itself or beside a cache of the library's."""
    ids = torch.tensor([prompt.token_ids])
    torch.manual_seed(7)
    with torch.inference_mode():
        if "stop_strings" in options:
            options = options | {"tokenizer": published.loaded.tokenizer}
        options = SIX | options | ({cache_argument(published.loaded.model.forward): cache} if cache is not None else {})
        output = published.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[:, ids.shape[1] :].tolist()


def trimmed(published, row):
    end = published.loaded.model.generation_config.eos_token_id
    return row[: row.index(end) + 1] if end in row else row


def ours(published, prompt, options):
    with published.client() as client:
        torch.manual_seed(7)
        answer = client.generate(prompt, **SIX | options)
        assert (TOKENS, None) == (answer.report.tokens_reused, answer.report.reason)
    return [list(answer.token_ids), *(list(other.token_ids) for other in answer.others)]


SAMPLED = {"do_sample": True}

EXAMPLES = {
    "max_length": {"max_length": TOKENS + 22, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": TOKENS + 22, "eos_token_id": list(range(2, 400))},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(2, 400))},
    "max_time": {"max_time": 60.0},
    "stop_strings": {"stop_strings": ["e", "a", "t"]},
    "early_stopping": {"early_stopping": True, "num_beams": 2},
    "eos_token_id": {"eos_token_id": list(range(2, 500))},
    "pad_token_id": {"pad_token_id": 3},
    "bos_token_id": {"bos_token_id": 0},
    "stopping_criteria": {"stopping_criteria": [lambda ids, _: torch.tensor([ids.shape[1] > TOKENS + 20])]},
    "do_sample": SAMPLED,
    "temperature": SAMPLED | {"temperature": 0.7},
    "top_k": SAMPLED | {"top_k": 5},
    "top_p": SAMPLED | {"top_p": 0.8},
    "min_p": SAMPLED | {"min_p": 0.001},
    "top_h": SAMPLED | {"top_h": 0.5},
    "typical_p": SAMPLED | {"typical_p": 0.5},
    "epsilon_cutoff": SAMPLED | {"epsilon_cutoff": 1e-3},
    "eta_cutoff": SAMPLED | {"eta_cutoff": 1e-3},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "length_penalty": {"length_penalty": 2.0, "num_beams": 3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(2, 300)]},
    "renormalize_logits": SAMPLED | {"renormalize_logits": True},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 11},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.5)},
    "suppress_tokens": {"suppress_tokens": list(range(2, 300))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(2, 300))},
    "sequence_bias": {"sequence_bias": [[[n], 5.0] for n in range(40, 60)]},
    "watermarking_config": {"watermarking_config": {"greenlist_ratio": 0.5, "bias": 4.0}},
    "logits_processor": {"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(TOKENS + 22, list(range(2, 400)))])},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda _, ids: [2 + ids.shape[0] % 500, 9]},
    "guidance_scale": {"guidance_scale": 3.0},
    "negative_prompt_ids": {"guidance_scale": 3.0, "negative_prompt_ids": torch.tensor([[5, 6, 7]])},
    "negative_prompt_attention_mask": {
        "guidance_scale": 3.0,
        "negative_prompt_ids": torch.tensor([[5, 6, 7]]),
        "negative_prompt_attention_mask": torch.tensor([[1, 1, 1]]),
    },
    "num_beams": {"num_beams": 4},
    "num_return_sequences": {"num_beams": 4, "num_return_sequences": 3},
    "max_matching_ngram_size": {"max_matching_ngram_size": 1},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9},
    "assistant_lookbehind": {"assistant_lookbehind": 3},
    "target_lookbehind": {"target_lookbehind": 3},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.9},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
    "compile_config": {"compile_config": CompileConfig()},
    "disable_compile": {"disable_compile": True},
    "generation_config": {"generation_config": GenerationConfig(num_beams=2, eos_token_id=1, pad_token_id=1)},
    "decoder_start_token_id": {"decoder_start_token_id": 3},
    "transformers_version": {"transformers_version": "5"},
}
"""An example of each, with which the option makes a difference wherever it can."""


def test_every_option_is_classified():
    """Of the installed library, each exactly once."""
    known = [*PASSES, *OWNED, *REFUSED]
    assert len(known) == len(set(known))
    configured = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    taken = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert set() == (configured | taken) - set(known)


def test_the_table_of_the_documentation_is_this_one():
    """docs/sdk.md shows what the code does."""
    assert options_table() in (Path(__file__).resolve().parents[1] / "docs" / "sdk.md").read_text("utf-8")


def test_every_option_that_passes_has_an_example():
    """None is waved through; streamers are tried in tests of streams."""
    assert set(PASSES) == {*EXAMPLES, "tokenizer", "streamer"}


@pytest.mark.parametrize("option", EXAMPLES)
def test_an_option_that_passes_gives_the_models_own_result(published, option):
    """To the token, in float32."""
    theirs = alone(published, asked(published), EXAMPLES[option])
    if len(theirs) > 1:
        theirs = [trimmed(published, row) for row in theirs]
    assert theirs == ours(published, asked(published), EXAMPLES[option])


SAMPLES = SAMPLED | {"num_return_sequences": 3}
BOTH = ("num_beams", "num_return_sequences", "prefill_chunk_size")


@pytest.mark.parametrize("option", BOTH)
def test_so_it_does_with_windows(windowed, option):
    """Beams copy, drafts cut back, and chunks split, what layers with a window hold."""
    theirs = [trimmed(windowed, row) for row in alone(windowed, asked(windowed), EXAMPLES[option])]
    assert theirs == [trimmed(windowed, row) for row in ours(windowed, asked(windowed), EXAMPLES[option])]


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_moe", "gemma3n_text", "gpt_oss", "deepseek_v32"])
@pytest.mark.parametrize("option", ["num_beams", "samples"])
def test_several_sequences_of_every_kind_of_cache(tmp_path_factory, kind, option):
    """Each sequence has a copy of the loaded cache: as of the library's own, made on the same schedule."""
    published = publish(tmp_path_factory, kind)
    options = SAMPLES if option == "samples" else EXAMPLES[option]
    cache = stock_cache(published.loaded, published.token_ids, 3, TOKENS)
    cache.batch_repeat_interleave(3 if option == "samples" else 4)
    theirs = [trimmed(published, row) for row in alone(published, asked(published), options, cache)]
    assert theirs == [trimmed(published, row) for row in ours(published, asked(published), options)]


def test_several_samples_are_several(published):
    """They differ, and are those the model would have drawn."""
    theirs = [trimmed(published, row) for row in alone(published, asked(published), SAMPLES)]
    assert theirs == ours(published, asked(published), SAMPLES)
    assert 3 == len({tuple(row) for row in theirs})


@pytest.mark.parametrize("option", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": "the model"}])
def test_the_librarys_assisted_decoding_is_wrong_beside_any_filled_cache(published, option):
    """Why it is refused: it puts the whole prompt behind what the cache holds. When this fails, it may pass."""
    model = published.loaded.model
    option = {name: model if value == "the model" else value for name, value in option.items()}
    prompt = asked(published)
    ids = torch.tensor([prompt.token_ids])
    cache = stock_cache(published.loaded, published.token_ids, 3, TOKENS)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), cache_argument(model.forward): cache}
    output = model.generate(**inputs, **SIX, **option)
    assert alone(published, prompt, {}) != output[:, ids.shape[1] :].tolist()
    assert cache.get_seq_length() > TOKENS + ids.shape[1]
    with published.client() as client:
        prepared = client.prepare(prompt)
        with pytest.raises(UsageError, match="other tokens"):
            model.generate(**prepared.inputs(), **SIX, **option)


REFUSALS = {name: object() for name in (*OWNED, *REFUSED)} | {"use_cache": False}


@pytest.mark.parametrize("option", REFUSALS)
@pytest.mark.parametrize("way", ["option", "generation_config"])
def test_an_option_that_would_not_be_right_is_refused_by_name(published, option, way):
    """As an option, and in a configuration object."""
    config = GenerationConfig()
    setattr(config, option, REFUSALS[option])
    options = {option: REFUSALS[option]} if way == "option" else {"generation_config": config}
    with published.client() as client, pytest.raises(UsageError, match=f"^{option} "):
        client.generate(asked(published), **options)


def test_an_option_that_nobody_knows_is_refused(published):
    """What a later version of the library brings is looked at first."""
    with published.client() as client, pytest.raises(UsageError, match="warp_speed is not an option known"):
        client.generate(asked(published), warp_speed=9)


@pytest.mark.parametrize(
    "option", [{"cache_implementation": "static"}, {"return_dict_in_generate": True}, {"use_cache": False}]
)
def test_a_models_own_default_does_not_get_in_the_way(published, monkeypatch, option):
    """Checkpoints ask for caches and outputs; the client's take their place."""
    expected = alone(published, asked(published), {})
    for name, value in option.items():
        monkeypatch.setattr(published.loaded.model.generation_config, name, value)
    assert expected == ours(published, asked(published), {})


def test_a_models_own_default_that_would_not_be_right_is_refused(published, monkeypatch):
    """It can be overruled by name."""
    monkeypatch.setattr(published.loaded.model.generation_config, "token_healing", True)
    with pytest.raises(UsageError, match="token_healing of the model's own"):
        check_options({}, published.loaded.model)
    assert {"token_healing": False}.items() <= check_options({"token_healing": False}, published.loaded.model).options.items()
