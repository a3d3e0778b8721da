"""LoRA adapters of tiny models, with random weights, saved as peft saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "v_proj", "down_proj"]


def tiny_adapter(folder: Path, checkpoint: Path, *, seed: int = 1, **config: Any) -> Path:
    """Writes an adapter for the model in `checkpoint` into `folder`, strong enough to change its KV, and returns it."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **config}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder
