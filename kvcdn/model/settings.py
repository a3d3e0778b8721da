"""Settings of a model in memory: what decides a pass besides tensors.

Plain attributes of modules, the attention it was set to, and code that is not its class's or its library's: hooks, of modules
or of all, other forwards, and functions put in place of those that its library's file has.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcdn.model.rope import follows_prompts

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_HOOKS_OF_ALL = ("_global_forward_hooks", "_global_forward_pre_hooks")

_KNOWN_CODE = frozenset({"torch", "transformers", "accelerate", "peft", "kvcdn", "huggingface_hub", *sys.stdlib_module_names})
"""Packages whose hooks, forwards and functions compute what the model does: they move weights, watch, or compile."""

_CHOSEN = ("_attn_implementation", "_experts_implementation")
"""Where a configuration says which of several functions computes."""

PROCESS = os.urandom(16).hex()
"""Code that is not known is told apart within a process, and by no other."""

Tables = Sequence[tuple[Mapping[str, Any], tuple[Any, ...]]]
"""Dictionaries, each with the objects that it held."""


class Settings:
    """Of one model, whose modules do not change: where they do, there is another one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._configs = (model.config, model.config.get_text_config(decoder=True))
        self._modules = list(model.modules())
        self._classes = list({type(module): None for module in self._modules})
        self._files = [sys.modules[name] for name in sorted({kind.__module__ for kind in self._classes}) if name in sys.modules]
        self._tables: Tables = []
        self._functions: list[Any] = []
        self._known = b""
        self.foreign = False

    def encoded(self) -> bytes:
        """Told anew where anything was assigned since the last look, which is a comparison of addresses."""
        functions = [kind.forward for kind in self._classes] + self._attention()
        if not self._tables or functions != self._functions or not stand(self._tables):
            self._functions = functions
            hooks = [vars(torch_module)[name] for name in _HOOKS_OF_ALL]
            tables = [table for module in self._modules for table in (vars(module), *(vars(module)[name] for name in _HOOKS))]
            files = [vars(file) for file in self._files]
            self._tables = [(table, tuple(table.values())) for table in (*tables, *hooks, *files)]
            own = _codes([*self._own_code(), *(hook for table in hooks for hook in table.values())])
            in_files = [value for table in files for value in table.values() if inspect.isfunction(value)]
            self.foreign = bool(own)
            self._known = repr([own, _codes([*functions, *in_files]), *map(_told, self._modules)]).encode()
        return self._known + repr(self._choices()).encode()

    def _choices(self) -> list[Any]:
        return [getattr(config, name, None) for config in self._configs for name in _CHOSEN]

    def _attention(self) -> list[Any]:
        return [ALL_ATTENTION_FUNCTIONS.get(name) for name in self._choices() if isinstance(name, str)]

    def _own_code(self) -> list[Any]:
        """What modules have that their classes do not."""
        own = [vars(module) for module in self._modules]
        hooks = [hook for attributes in own for name in _HOOKS for hook in attributes[name].values()]
        return hooks + [attributes["forward"] for attributes in own if "forward" in attributes]


def _told(module: torch.nn.Module) -> list[Any]:
    return [
        value
        for name, value in vars(module).items()
        if type(value) in (bool, int, float, str) and name[0] != "_" and not follows_prompts(module, name)
    ]


def stand(tables: Tables) -> bool:
    """Whether every table holds the very objects that it held."""
    return all(len(table) == len(values) and all(map(operator.is_, table.values(), values)) for table, values in tables)


def _codes(functions: Iterable[Any]) -> list[str]:
    """Those of packages that are not known."""
    return [code for function in functions if (code := _code(function))]


def _code(function: Any) -> str:
    """Which function this is; nothing where its package is known."""
    place = str(getattr(function, "__module__", None) or type(function).__module__)
    if function is None or place.partition(".")[0] in _KNOWN_CODE:
        return ""
    try:
        number = _numbers.setdefault(function, next(_counter))
    except TypeError:  # it cannot be referred to weakly
        number = -id(function)
    return f"{place} {number} {PROCESS}"


_counter = itertools.count()

_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""A place in memory would not do: another function may have it later."""
