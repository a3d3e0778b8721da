"""The price book: the presets, and what a TOML text adds to them or puts in their place."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvcdn.economics.devices import DEVICES, LINKS, Device, Link
from kvcdn.economics.models import MODELS, Model
from kvcdn.economics.prices import DELIVERIES, STORES, TARIFFS, Delivery, Store, Tariff
from kvcdn.errors import UsageError

T = TypeVar("T")

_SAMPLE = "infra/prices.toml is a commented sample"

_WORDS = {"source", "price_source", "date"}
"""Fields that hold words; all others hold numbers."""


@dataclass(frozen=True)
class PriceBook:
    """All names that options may use."""

    models: Mapping[str, Model]
    stores: Mapping[str, Store]
    deliveries: Mapping[str, Delivery]
    tariffs: Mapping[str, Tariff]
    devices: Mapping[str, Device]
    links: Mapping[str, Link]

    @classmethod
    def presets(cls) -> PriceBook:
        return cls(MODELS, STORES, DELIVERIES, TARIFFS, DEVICES, LINKS)

    def with_toml(self, text: str, what: str) -> PriceBook:
        """This book with the entries of `text`: tables `[store.NAME]`, `[delivery.NAME]`, `[tariff.NAME]` and `[device.NAME]`.

        Raises UsageError, naming `what`, for anything that is not an entry with exactly the fields of its kind.
        """
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{what}: {error}", hint=_SAMPLE) from None
        unknown = set(tables) - {"store", "delivery", "tariff", "device"}
        if unknown:
            raise UsageError(f"{what}: no such table as [{min(unknown)}]", hint=_SAMPLE)
        return dataclasses.replace(
            self,
            stores={**self.stores, **_entries(Store, tables, "store", what)},
            deliveries={**self.deliveries, **_entries(Delivery, tables, "delivery", what)},
            tariffs={**self.tariffs, **_entries(Tariff, tables, "tariff", what)},
            devices={**self.devices, **_entries(Device, tables, "device", what)},
        )


def _entries(make: Callable[..., T], tables: Mapping[str, Any], kind: str, what: str) -> dict[str, T]:
    found = tables.get(kind, {})
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise UsageError(f"{what}: [{kind}] holds tables, as in [{kind}.mine]", hint=_SAMPLE)
    return {name: _entry(make, name, entry, f"{what}: [{kind}.{name}]") for name, entry in found.items()}


def _entry(make: Callable[..., T], name: str, entry: Mapping[str, Any], what: str) -> T:
    fields = {field.name: field for field in dataclasses.fields(make) if field.name not in {"name", "measured"}}  # type: ignore[arg-type]
    for key, value in entry.items():
        if key not in fields:
            raise UsageError(f"{what}: {key} is no setting", hint=f"known: {', '.join(fields)}")
        words = key in _WORDS
        if isinstance(value, str) != words or (not words and (isinstance(value, bool) or not isinstance(value, int | float))):
            raise UsageError(f"{what}: {key} must be {'a string' if words else 'a number'}", hint=_SAMPLE)
    needed = [key for key, field in fields.items() if field.default is dataclasses.MISSING]
    needed += ["peak_flops"] if make is Device else []
    missing = [key for key in needed if key not in entry]
    if missing:
        raise UsageError(f"{what}: {missing[0]} is missing", hint=_SAMPLE)
    try:
        return make(name=name, **entry)
    except UsageError as error:
        raise UsageError(f"{what}: {str(error).removeprefix(f'{name}: ')}", hint=_SAMPLE) from None
