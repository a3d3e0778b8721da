"""Prompts that come as a tokenizer's tensors: read as tokens, or refused where a mask or positions say something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvcdn.errors import UsageError
from kvcdn.model.tokens import Prompt

_KNOWN = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


def read_prompts(inputs: Mapping[str, Any]) -> list[Prompt]:
    """The rows of `input_ids` [b, n] without their padding, which must be on the left.

    Raises UsageError for holes in the mask, padding on the right, positions that do not count tokens, and inputs besides.
    """
    unknown = [name for name, value in inputs.items() if value is not None and name not in _KNOWN]
    if unknown:
        raise UsageError(f"a prompt of tokens has no {unknown[0]}", hint="give input_ids and attention_mask alone")
    ids = _matrix(inputs, "input_ids", None)
    if ids is None:
        raise UsageError("a prompt of tensors needs input_ids")
    mask = _matrix(inputs, "attention_mask", ids)
    positions = _matrix(inputs, "position_ids", ids)
    types = _matrix(inputs, "token_type_ids", ids)
    if types is not None and bool(types.any()):
        raise UsageError("token_type_ids other than 0 are not part of what a cache is named by")
    return [
        _row(number, row, None if mask is None else mask[number], None if positions is None else positions[number])
        for number, row in enumerate(ids)
    ]


def _row(number: int, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> Prompt:
    kept = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
    count, length = int(kept.sum()), ids.shape[0]
    if not torch.equal(kept, (torch.arange(length, device=ids.device) >= length - count).to(ids.dtype)):
        where = "on the right" if bool(kept[0] == 1) and int(kept[:count].sum()) == count else "in between"
        raise UsageError(
            f"row {number} of attention_mask leaves out tokens {where}: a cache would be at other positions than the prompt",
            hint="pad on the left (tokenizer.padding_side = 'left'), or not at all",
        )
    if positions is not None and positions[length - count :].tolist() != list(range(count)):
        raise UsageError(f"row {number} of position_ids does not count the tokens from 0: published caches do")
    return Prompt(tuple(ids[length - count :].tolist()))


def _matrix(inputs: Mapping[str, Any], name: str, like: torch.Tensor | None) -> torch.Tensor | None:
    value = inputs.get(name)
    if value is None:
        return None
    matrix = torch.as_tensor(value).cpu()
    matrix = matrix.unsqueeze(0) if matrix.ndim == 1 else matrix
    if matrix.ndim != 2 or matrix.is_floating_point() or (like is not None and matrix.shape != like.shape):  # noqa: PLR2004 - rows and columns
        raise UsageError(f"{name} of shape {tuple(matrix.shape)} and {matrix.dtype} is not a table of integers, a row a prompt")
    return matrix
