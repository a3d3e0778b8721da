"""Options: every option of the model's generate(), and whether it is right beside a cache that was loaded.

A loaded cache is right for the prompt it was made for, at the positions it was made for. An option is let through where the
result is the model's own (tests/test_client_options.py compares each), made by the client where it would break that relation,
and refused by name and with the reason otherwise; so is an option that is not in the table, until somebody has looked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from kvcdn.errors import UsageError

PASSES: tuple[str, ...] = (
    # how long
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "early_stopping",
    "eos_token_id", "pad_token_id", "bos_token_id", "stopping_criteria",
    # how to choose
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "watermarking_config", "logits_processor", "prefix_allowed_tokens_fn", "guidance_scale",
    "negative_prompt_ids", "negative_prompt_attention_mask",
    # several at once
    "num_beams", "num_return_sequences",
    # settings of drafting, without effect where nothing drafts
    "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    # how it runs
    "prefill_chunk_size", "compile_config", "disable_compile", "streamer", "tokenizer", "generation_config",
    # without effect on a decoder
    "decoder_start_token_id", "transformers_version",
)  # fmt: skip
"""Right beside a loaded cache."""

_PREPARE = "use prepare() and call model.generate yourself"


@dataclass(frozen=True)
class Refusal:
    """Why an option is refused, with which values it changes nothing, and what to do instead."""

    reason: str
    harmless: tuple[Any, ...] = (None,)
    hint: str = ""


OWNED: Mapping[str, Refusal] = {
    **dict.fromkeys(
        ("input_ids", "inputs", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids"),
        Refusal("belongs to the cache, and is made by the client together with it", hint=_PREPARE),
    ),
    **dict.fromkeys(("past_key_values", "cache"), Refusal("is made by the client", hint=_PREPARE)),
    **dict.fromkeys(
        ("cache_implementation", "cache_config", "max_cache_len"),
        Refusal("asks for another cache than the loaded one", hint=_PREPARE),
    ),
    "use_cache": Refusal("without a cache nothing is reused", (None, True), "call model.generate yourself"),
    **dict.fromkeys(
        ("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        Refusal("has no place in an Answer, and says nothing of tokens that were loaded", (None, False), _PREPARE),
    ),
}
"""Made by the client; a model's own default for one of these is put aside."""

_ASSISTED = (
    "prompt_lookup_num_tokens", "assistant_model", "assistant_tokenizer", "assistant_early_exit", "use_mtp", "speculation_type",
)  # fmt: skip

REFUSED: Mapping[str, Refusal] = {
    "token_healing": Refusal("replaces the end of the prompt, to which the cache belongs", (None, False)),
    **dict.fromkeys(
        ("penalty_alpha", "dola_layers", "constraints", "force_words_ids"),
        Refusal("is a strategy that the library loads as code from a hub", (None, 0, 0.0)),
    ),
    "num_beam_groups": Refusal("is a strategy that the library loads as code from a hub", (None, 1)),
    "diversity_penalty": Refusal("is a strategy that the library loads as code from a hub", (None, 0, 0.0)),
    **dict.fromkeys(("custom_generate", "trust_remote_code"), Refusal("runs code that nobody here has seen", (None, False))),
    "low_memory": Refusal("was given up by the library", (None, False)),
    **dict.fromkeys(
        _ASSISTED,
        Refusal(
            "is assisted decoding, for which the library reads the whole prompt once more behind the loaded cache",
            (None, False),
            "ask without it",
        ),
    ),
    "is_assistant": Refusal("marks the drafting side of assisted decoding", (None, False)),
    "continuous_batching_config": Refusal("switches to a scheduler with a cache of its own"),
    "synced_gpus": Refusal("every process of a group would have to load the same", (None, False)),
    "logits_to_keep": Refusal("is the library's own to set"),
}
"""Refused with the reason."""


_CONFIGURED = frozenset(vars(GenerationConfig()))
"""Options that a generation configuration knows."""


@dataclass(frozen=True)
class Checked:
    """Options that may go to generate(), and `copies`: how many sequences the cache must hold."""

    options: dict[str, Any]
    copies: int


def check_options(options: Mapping[str, Any], model: PreTrainedModel, tokenizer: Any = None) -> Checked:
    """Looks at every option of one call, of its `generation_config` and of the model's. Raises UsageError that names one."""
    for name, value in options.items():
        _require_harmless(name, value, "")
        if name not in PASSES and name not in OWNED and name not in REFUSED:
            meant = get_close_matches(name, PASSES, 1)
            hint = f"did you mean {meant[0]}?" if meant else _PREPARE
            raise UsageError(f"{name} is not an option known to be right beside a loaded cache", hint=hint)
    asked = options.get("generation_config")
    for name, value in _set(asked):
        _require_harmless(name, value, "of generation_config ")
    overrides = {}
    for name, value in _set(model.generation_config):
        if name in OWNED and not _harmless(OWNED[name], value):
            overrides[name] = OWNED[name].harmless[-1]
        elif name not in options and getattr(asked, name, None) is None:
            _require_harmless(name, value, "of the model's own generation_config ")

    def effective(name: str) -> Any:
        values = (options.get(name), getattr(asked, name, None), getattr(model.generation_config, name, None))
        return next((value for value in values if value is not None), None)

    # Harmless values go too: they may overrule the model's own.
    passed = {name: value for name, value in options.items() if name in PASSES or (name in REFUSED and name in _CONFIGURED)}
    if effective("stop_strings") is not None and tokenizer is not None:
        passed.setdefault("tokenizer", tokenizer)
    return Checked({**passed, **overrides}, max(effective("num_beams") or 1, effective("num_return_sequences") or 1))


def listed(options: Mapping[str, Any], name: str) -> list[Any]:
    """The list `name` among `options`, empty where there is none. Raises UsageError for what is no list."""
    value = options.get(name)
    if value is not None and not isinstance(value, list | tuple):
        raise UsageError(f"{name} is a {type(value).__name__}, and no list", hint=f"{name}=[...]")
    return list(value or ())


def options_table() -> str:
    """The table of docs/sdk.md."""
    rows = ["| option | beside a loaded cache |", "|---|---|", f"| {_names(PASSES)} | the model's own result |"]
    for group, verb in ((OWNED, "made by the client: it"), (REFUSED, "refused: it")):
        reasons = dict.fromkeys(refusal.reason for refusal in group.values())
        rows += [
            f"| {_names([name for name, refusal in group.items() if refusal.reason == reason])} | {verb} {reason} |"
            for reason in reasons
        ]
    return "\n".join(rows).replace("it without a cache", "without a cache")


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _set(config: Any) -> list[tuple[str, Any]]:
    """What a generation configuration sets."""
    return [(name, value) for name, value in vars(config).items() if not name.startswith("_")] if config is not None else []


def _require_harmless(name: str, value: Any, where: str) -> None:
    refusal = OWNED.get(name) or REFUSED.get(name)
    if refusal is not None and not _harmless(refusal, value):
        raise UsageError(f"{name} {where}is refused: it {refusal.reason}", hint=refusal.hint)


def _harmless(refusal: Refusal, value: Any) -> bool:
    return isinstance(value, int | float | str | None) and value in refusal.harmless
