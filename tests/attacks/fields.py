"""Attacks on the fields of a header: each field in turn missing, unknown, of another type, or out of range."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attacks.attack import Attack
from attacks.forge import edited, without

WRONG_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "minus-one": -1,
    "2^53-1": 2**53 - 1,
    "text": "x",
    "empty-text": "",
    "long-text": "x" * 100_000,
    "list": [],
    "nested-list": [[]],
    "object": {},
}
"""Every JSON type, and the far ends of the ranges. No field but free text takes any of them."""

FREE_TEXT = {"model_name", "label", "torch", "transformers", "device", "attention"}


def field_attacks(header: dict[str, Any], write: Callable[[dict[str, Any]], bytes]) -> Iterator[Attack]:
    """Every field of `header`, at every depth, against every wrong value; `write` signs a header."""
    for path in _paths(header):
        name = ".".join(map(str, path))
        if path != ("publisher",) and isinstance(path[-1], str):
            yield Attack(f"{name}-missing", write(without(header, path)), "missing")
        for kind, value in WRONG_VALUES.items():
            if path == ("publisher",) or _takes(path, kind):
                continue
            yield Attack(f"{name}-is-{kind}", write(edited(header, path, value)), _named(path))
    for path in _objects(header):
        name = ".".join(map(str, (*path, "extra")))
        yield Attack(f"{name}-unknown", write(edited(header, (*path, "extra"), 1)), "unknown field")


def _named(path: tuple[str | int, ...]) -> str:
    """What the message must name: the field, or the kind of item in an array (`segment 0` of `segments`)."""
    return str([step for step in path if isinstance(step, str)][-1]).removesuffix("s")


def _takes(path: tuple[str | int, ...], kind: str) -> bool:
    return (path[-1] in FREE_TEXT and kind in {"text", "empty-text"}) or (path[-1] == "expires" and kind == "null")


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all fields, and of the first item of each array: the others are read by the same code."""
    if path:
        yield path
    if isinstance(value, dict):
        for name in value:
            yield from _paths(value[name], (*path, name))
    elif isinstance(value, list):
        yield from _paths(value[0], (*path, 0))


def _objects(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        yield path
        for name in value:
            yield from _objects(value[name], (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _objects(item, (*path, index))
