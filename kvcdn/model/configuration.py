"""What of a model decides how its code runs, whatever its weights: what was tried once holds for all that have it."""

from __future__ import annotations

import json

import torch
import transformers
from transformers import PreTrainedModel

from kvcdn.digest import hash_bytes


def configuration_key(model: PreTrainedModel) -> str:
    """A name for `model`'s class, configuration and dtype, and for the libraries that run it."""
    config = json.dumps([type(model).__name__, model.config.to_dict()], sort_keys=True, default=str)
    return f"{hash_bytes(config.encode())} {model.dtype} transformers={transformers.__version__} torch={torch.__version__}"
