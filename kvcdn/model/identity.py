"""Identities without weights: what a checkpoint's files and an empty model tell, which is all that names need.

The model is built from its configuration on torch's `meta` device, where tensors have shapes and no memory, and runs on one
token there: the layout of its cache is that of the loaded model (`tests/test_model_identity.py` compares the two).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from kvcdn.errors import UnsupportedModelError
from kvcdn.keys import ModelIdentity
from kvcdn.layout import Layout
from kvcdn.model.checkpoint import first_line, resolve_checkpoint
from kvcdn.model.fingerprint import fingerprint_checkpoint, weights_dtype
from kvcdn.model.layers import DTYPE_NAMES
from kvcdn.model.load import LOAD_ERRORS, load_model
from kvcdn.model.probe import probe_layout


@dataclass(frozen=True)
class IdentifiedModel:
    """What a prompt needs to be named: a tokenizer, and what its KV is bound to."""

    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity
    folder: Path


def identify_model(name: str, adapters: Sequence[Path] = ()) -> IdentifiedModel:
    """Identifies the model `name` (folder, hub id or alias) as `load_model` would. Raises a KvcdnError.

    It is loaded only with `adapters`: what they are bound to is how the model in memory applies them.
    """
    checkpoint = resolve_checkpoint(name)
    if adapters:
        loaded = load_model(name, adapters=adapters)
        return IdentifiedModel(loaded.tokenizer, loaded.identity, checkpoint.folder)
    fingerprint = fingerprint_checkpoint(checkpoint.folder)
    identity = ModelIdentity(fingerprint, empty_layout(checkpoint.folder), checkpoint.name)
    return IdentifiedModel(load_tokenizer(checkpoint.folder), identity, checkpoint.folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint's folder. Raises UnsupportedModelError."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except LOAD_ERRORS as error:
        raise UnsupportedModelError(f"transformers cannot load the tokenizer in {folder}: {first_line(error)}") from None


def empty_layout(folder: Path) -> Layout:
    """The layout of the cache of the checkpoint in `folder`, in the dtype it is stored in. Raises UnsupportedModelError."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        dtype = config.dtype or getattr(torch, weights_dtype(folder))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    except (*LOAD_ERRORS, RuntimeError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"transformers cannot make a model of {folder / 'config.json'}: {first_line(error)}"
        ) from None
    try:
        return probe_layout(model)
    except (RuntimeError, NotImplementedError):
        # Some kernels know no such device in this dtype (experts in float16): then the weights are loaded after all.
        return load_model(str(folder)).identity.layout


def layout_dtype(identity: ModelIdentity) -> torch.dtype:
    """The dtype of a layout's first tensor: the model's own."""
    name = next(tensor.dtype for layer in identity.layout.layers for tensor in layer.parts(checkpoint=True))
    return next(dtype for dtype, text in DTYPE_NAMES.items() if text == name)
