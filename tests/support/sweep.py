"""Every causal language model that transformers knows, made small: carried to the bit, refused by name, or a fault.

    make test-kinds

Each architecture is published, fetched and continued as in the tests of kinds; and what it answers from a loaded cache is
compared with one pass over the whole prompt, which shows models that the library itself does not run in several passes.
The result is docs/models.md.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcdn import layout
from kvcdn.errors import UnsupportedModelError
from kvcdn.model.tokens import Prompt
from support import tiny
from support.published import Published, publish_text
from support.special import PARTS, SPECIAL
from support.stock import continued, stock_cache

ROOT = Path(__file__).resolve().parents[2]

SECONDS = 90
"""Of a processor, for one architecture; some kernels' fallbacks are slow beyond reason."""

MOST_PARAMETERS = 30_000_000

BLOCK = 64
TOKENS = 3 * BLOCK + 20
QUESTION = (17, 4, 250, 9, 33)
STEPS = 2

SAME = 1e-3
"""Relative difference of logits in float32 that rounding can make."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "model_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "attention_head_dim"), 16),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"), 1024
    ),
    **dict.fromkeys(("rotary_dim", "state_size", "mamba_d_state", "ssm_state_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "shared_expert_intermediate_size", "local_attention_window"), 32
    ),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
    **dict.fromkeys(("vocab_size_per_layer_input",), 800),
    **tiny._EXPERTS,
    "index_n_heads": 16,
    "index_topk": 40,
}
"""What makes a model small, under the names that configurations have for it."""


class TooLateError(BaseException):
    """An architecture takes too long. Nobody on the way catches it."""


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture."""

    model_type: str
    status: str
    detail: str


def small_config(model_type: str) -> Any:
    """A small configuration of `model_type`: ours where the tests have one, else with every size that it knows set small."""
    known = {**tiny._EXTRA.get(model_type, {})}
    kinds = (*tiny.FULL_ATTENTION_KINDS, *tiny.MORE_FULL_ATTENTION_KINDS, *tiny.WINDOW_KINDS, *tiny.SHARED_KINDS)
    of_tests = {*kinds, *tiny.INDEXED_KINDS, *tiny.STATE_KINDS, *tiny.REFUSED_STATE_KINDS}
    make = CONFIG_MAPPING[model_type]
    if model_type in of_tests:
        settings = {**tiny._SMALL, **known, "vocab_size": 800}
        # With few heads many scores of an indexer are exactly 0, and which of equals it takes is not said.
        settings |= {"index_n_heads": 16} if "index_n_heads" in known else {}
        for name in tiny._NOT_SETTABLE.get(model_type, ()):
            settings.pop(name)
        return make(**settings)
    try:
        fields = make().to_dict()
    except StrictDataclassError:  # what it is made of has to be said
        fields = {}
    settings = {name: value for name, value in SIZES.items() if name in fields}
    settings |= {"vocab_size": 800} if "vocab_size" in fields else {}
    settings |= tiny._LATENT if "kv_lora_rank" in fields else {}
    if isinstance(fields.get("text_config"), Mapping):
        inner = {name: value for name, value in SIZES.items() if name in fields["text_config"]}
        settings["text_config"] = {**inner, "model_type": fields["text_config"].get("model_type"), "vocab_size": 800}
    return make(**{**settings, **SPECIAL.get(model_type, {})})


def model_maker(model_type: str) -> Callable[[], Any]:
    """Makes a small model of `model_type`."""
    config = small_config(model_type)
    if model_type not in PARTS:
        return partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
    part = getattr(config, PARTS[model_type])
    return partial(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]), part)


def checkpoint_of(model_type: str, folder: Path) -> Path:
    """A checkpoint of a small model of `model_type`, float32, with random weights."""
    make = model_maker(model_type)
    with torch.device("meta"):
        parameters = sum(tensor.numel() for tensor in make().parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:,.0f} million parameters, although every known size was set to a small one")
    torch.manual_seed(0)
    model = make().float()
    tiny.strengthen(model, 2)
    tiny.tiny_tokenizer(folder)
    model.save_pretrained(folder)
    return folder


def relative(expected: torch.Tensor, got: torch.Tensor) -> float:
    return float((expected - got).norm() / expected.norm().clamp_min(1e-30))


def stock(published: Published, reused: int) -> Any:
    """The library's own cache on the publisher's schedule, holding `reused` tokens of the document."""
    loaded, ids = published.loaded, published.token_ids
    if not reused:
        return DynamicCache(config=loaded.model.config)
    if loaded.identity.layout.state_bytes:
        return stock_cache(loaded, ids[:reused], TOKENS, reused)
    return stock_cache(loaded, ids, -(-reused // BLOCK), reused)


def faults(published: Published) -> Iterator[str]:
    """What is wrong with how this model is carried."""
    loaded, ids = published.loaded, published.token_ids
    end = loaded.identity.layout.document_end(TOKENS)
    with published.client() as client:
        for leading, behind, least in (
            (TOKENS, QUESTION, end),
            (2 * BLOCK + 30, QUESTION, 2 * BLOCK),
            (TOKENS, (), TOKENS - 1),
        ):
            prompt = Prompt((*ids[:leading], *behind), (TOKENS,))
            prepared = client.prepare(prompt)
            reused = prepared.report.tokens_reused
            if reused != least:
                yield f"{reused} tokens are reused of {least}: {prepared.report.detail}"
                continue
            rest = prompt.token_ids[reused:]
            ours = continued(loaded, prepared.cache, rest, STEPS)
            theirs = continued(loaded, stock(published, reused), rest, STEPS)
            if not all(torch.equal(expected, got) for expected, got in zip(theirs, ours, strict=True)):
                yield f"behind {reused} tokens other bits than the library's own cache gives"
            with torch.inference_mode():
                once = loaded.model(input_ids=torch.tensor([prompt.token_ids])).logits[:, reused:]
            if not relative(once, ours[0]) <= SAME:
                yield f"behind {reused} tokens logits are {relative(once, ours[0]):.1e} from one pass"
        yield from generation_faults(published, client)


def generation_faults(published: Published, client: Any) -> Iterator[str]:
    """The same through generate(), which makes positions and masks itself."""
    model = published.loaded.model
    prepared = client.prepare(Prompt((*published.token_ids, *QUESTION), (TOKENS,)))
    options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ours = model.generate(**prepared.inputs(), **options).logits
    ids, mask = prepared.input_ids, prepared.attention_mask
    theirs = model.generate(input_ids=ids, attention_mask=mask, **options).logits
    if not relative(theirs[0], ours[0]) <= SAME:
        yield f"generate() gives logits {relative(theirs[0], ours[0]):.1e} from those without a cache"


def outcome(model_type: str) -> Outcome:
    """Tries one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_DATA_HOME"] = folder
        try:
            checkpoint = checkpoint_of(model_type, Path(folder))
        except Exception as error:  # noqa: BLE001 - whatever it is, there is no model to try
            return Outcome(model_type, "not tried", first_line(error))
        try:
            published = publish_text(checkpoint, tokens=TOKENS)
        except UnsupportedModelError as error:
            return Outcome(model_type, "refused", str(error))
        except Exception as error:  # noqa: BLE001 - a fault is what is looked for
            return Outcome(model_type, "FAULT", f"publishing: {type(error).__name__}: {first_line(error)}")
        try:
            found = list(faults(published))
        except Exception as error:  # noqa: BLE001
            found = [f"{type(error).__name__}: {first_line(error)}"]
    kinds = sorted({spec.kind + ("+state" if spec.states else "") for spec in published.loaded.identity.layout.layers})
    return Outcome(model_type, "FAULT", "; ".join(found)) if found else Outcome(model_type, "to the bit", ", ".join(kinds))


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def small_blocks() -> Iterator[None]:
    """Short texts have several blocks, and checkpoints."""
    before = layout.MAX_BLOCK_TOKENS, layout.CHECKPOINT_BLOCKS
    layout.MAX_BLOCK_TOKENS, layout.CHECKPOINT_BLOCKS = BLOCK, 2
    try:
        yield
    finally:
        layout.MAX_BLOCK_TOKENS, layout.CHECKPOINT_BLOCKS = before


def timed(model_type: str) -> Outcome:
    """`outcome`, in at most so many seconds of a processor, without the library's chatter."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)

    def late(*_: Any) -> None:
        raise TooLateError(f"more than {SECONDS} seconds of a processor")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with small_blocks():
            return outcome(model_type)
    except TooLateError as error:
        return Outcome(model_type, "not tried", str(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def sweep(model_types: list[str]) -> list[Outcome]:
    """Every architecture in a process of its own."""
    found = []
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for done in pool.imap_unordered(timed, model_types):
            sys.stderr.write(f"{done.status:10}  {done.model_type}: {done.detail}\n")
            found.append(done)
    return sorted(found, key=lambda done: done.model_type)


def document(found: list[Outcome]) -> str:
    """docs/models.md."""
    counts = Counter(done.status for done in found)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    lines = [
        "# Models",
        "",
        f"Every causal language model of transformers, made small, with random weights, in float32 on a CPU ({versions}):",
        "what `make test-kinds` found.",
        "",
        f"{counts['to the bit']} model types are carried *to the bit*: what is published, fetched and continued is what the",
        "library's own cache gives on the same schedule, at several lengths, and what one pass over the whole prompt gives but",
        "for rounding.",
        f"{counts['refused']} are *refused* by name.",
        f"{counts['not tried']} were *not tried*: no small model of them could be made by setting sizes.",
        "Encoders (BERT and its kin) are tried as the decoders that `is_decoder` makes of them; else they keep no cache.",
        *([f"{counts['FAULT']} have a fault, which is not mended yet."] if counts["FAULT"] else []),
        "",
        "| model type | result | kinds of layers (FORMAT.md 2.3), or why |",
        "|---|---|---|",
    ]
    lines += [f"| `{done.model_type}` | {done.status} | {plain(done.detail)} |" for done in found]
    return "\n".join(lines) + "\n"


def plain(detail: str) -> str:
    """Fit for a table, and the same in every run."""
    return re.sub(r"/\S*/tmp\w+", "the checkpoint", re.sub(r"[|<>]", " ", detail)).strip()


def main() -> int:
    """Sweeps the model types given, or all, and then writes the document."""
    chosen = sys.argv[1:]
    found = sweep(chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    if not chosen:
        (ROOT / "docs" / "models.md").write_text(document(found), "utf-8")
    return 1 if any(done.status == "FAULT" for done in found) else 0


if __name__ == "__main__":
    sys.exit(main())
