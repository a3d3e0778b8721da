"""Tariffs: what tenants are to pay, as a TOML text says it. Three kinds, as model services have them.

*serverless* charges by the token; *provisioned* a reserved rate by the hour, used or not, and by the token what exceeds it in
any hour; *dedicated* machines by the hour, whatever they do. Numbers are decimal as written.
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, Self

from kvcdn.errors import UsageError

_SAMPLE = "infra/tariff.toml is a commented sample"

MAX_PRICE = Decimal(10**9)

MAX_TARIFFS = 1000

MAX_DECIMALS = 12


class Kind(enum.StrEnum):
    """How a tariff charges."""

    SERVERLESS = "serverless"
    PROVISIONED = "provisioned"
    DEDICATED = "dedicated"


class Basis(enum.StrEnum):
    """Whose counts are billed."""

    EDGE = "edge"
    """Tokens of blocks that edges served: the operator's own word."""
    CLIENT = "client"
    """Tokens that clients reused and prefilled: for who runs the clients himself."""


_NEEDED: Mapping[Kind, frozenset[str]] = {
    Kind.SERVERLESS: frozenset(("reused_per_million",)),
    Kind.PROVISIONED: frozenset(("tokens_per_hour", "per_hour")),
    Kind.DEDICATED: frozenset(("per_hour",)),
}

_TOKEN_PRICES = ("reused_per_million", "prefilled_per_million", "published_per_million")

_ALLOWED: Mapping[Kind, frozenset[str]] = {
    Kind.SERVERLESS: frozenset((*_TOKEN_PRICES, "delivered_per_gb")),
    Kind.PROVISIONED: frozenset(
        ("tokens_per_hour", "per_hour", "over_per_million", "published_per_million", "delivered_per_gb")
    ),
    Kind.DEDICATED: frozenset(("per_hour", "machines", "delivered_per_gb")),
}


@dataclass(frozen=True)
class Tariff:
    """One tariff. Prices in the book's currency; what is missing is free."""

    name: str
    kind: Kind
    prices: Mapping[str, Decimal]

    def price(self, item: str) -> Decimal:
        return self.prices.get(item, Decimal(0))


@dataclass(frozen=True)
class TariffBook:
    """Which tenant has which tariff, and how amounts are rounded."""

    tariffs: Mapping[str, Tariff]
    tenants: Mapping[str, str]
    """Tariffs by tenants, or shell patterns of them; the first that fits counts."""
    currency: str = "USD"
    decimals: int = 2
    basis: Basis = Basis.EDGE

    def of(self, tenant: str) -> Tariff | None:
        """The tenant's tariff, or None. A tenant's own name goes before patterns."""
        name = self.tenants.get(tenant)
        if name is None and tenant:
            name = next((tariff for pattern, tariff in self.tenants.items() if fnmatchcase(tenant, pattern)), None)
        return None if name is None else self.tariffs[name]

    @classmethod
    def of_toml(cls, text: str, what: str) -> Self:
        """Reads a tariff file. Raises UsageError, naming `what`, for anything that is none."""
        try:
            tables = tomllib.loads(text, parse_float=Decimal)
        except (tomllib.TOMLDecodeError, ArithmeticError) as error:
            raise UsageError(f"{what}: {error}", hint=_SAMPLE) from None
        unknown = set(tables) - {"currency", "decimals", "basis", "tariff", "tenants"}
        if unknown:
            raise UsageError(f"{what}: {min(unknown)} is no setting", hint=_SAMPLE)
        currency, decimals, basis = tables.get("currency", "USD"), tables.get("decimals", 2), tables.get("basis", "edge")
        if not (isinstance(currency, str) and len(currency) == 3 and currency.isascii() and currency.isupper()):  # noqa: PLR2004 - ISO 4217
            raise UsageError(f"{what}: currency is a code such as USD", hint=_SAMPLE)
        if not (type(decimals) is int and 0 <= decimals <= MAX_DECIMALS):
            raise UsageError(f"{what}: decimals is a whole number from 0 to {MAX_DECIMALS}", hint=_SAMPLE)
        if basis not in list(Basis):
            raise UsageError(f"{what}: basis is one of {', '.join(Basis)}", hint=_SAMPLE)
        tariffs = _tariffs(tables.get("tariff"), what)
        tenants = _tenants(tables.get("tenants"), tariffs, what)
        return cls(tariffs, tenants, currency, decimals, Basis(basis))


def _tariffs(table: Any, what: str) -> dict[str, Tariff]:
    if (
        not isinstance(table, dict)
        or not 1 <= len(table) <= MAX_TARIFFS
        or not all(isinstance(one, dict) for one in table.values())
    ):
        raise UsageError(f"{what}: there is no table such as [tariff.standard]", hint=_SAMPLE)
    return {name: _tariff(name, entry, f"{what}: [tariff.{name}]") for name, entry in table.items()}


def _tariff(name: str, entry: Mapping[str, Any], what: str) -> Tariff:
    kind = entry.get("kind")
    if kind not in list(Kind):
        raise UsageError(f"{what}: kind is one of {', '.join(Kind)}", hint=_SAMPLE)
    kind = Kind(kind)
    prices = {key: _number(f"{what}: {key}", value) for key, value in entry.items() if key != "kind"}
    for key in prices:
        if key not in _ALLOWED[kind]:
            raise UsageError(
                f"{what}: {key} is no price of a {kind} tariff", hint=f"it has {', '.join(sorted(_ALLOWED[kind]))}"
            )
    missing = _NEEDED[kind] - set(prices)
    if missing:
        raise UsageError(f"{what}: {min(missing)} is missing", hint=_SAMPLE)
    for key in ("machines", "tokens_per_hour"):
        if prices.get(key, Decimal(0)) % 1:
            raise UsageError(f"{what}: {key} is a whole number", hint=_SAMPLE)
    return Tariff(name, kind, prices)


def _number(what: str, value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise UsageError(f"{what} is a number", hint=_SAMPLE)
    number = Decimal(value)
    if not (number.is_finite() and 0 <= number <= MAX_PRICE and -number.normalize().as_tuple().exponent <= MAX_DECIMALS):  # type: ignore[operator] # finite
        raise UsageError(f"{what} is a number from 0 to {MAX_PRICE} with at most {MAX_DECIMALS} decimals", hint=_SAMPLE)
    return number


def _tenants(table: Any, tariffs: Mapping[str, Tariff], what: str) -> dict[str, str]:
    if not isinstance(table, dict) or not table:
        raise UsageError(f"{what}: there is no table [tenants]", hint=_SAMPLE)
    for tenant, name in table.items():
        if name not in tariffs:
            raise UsageError(
                f"{what}: [tenants] {tenant[:64]} has the tariff {str(name)[:64]!r}, which is not there", hint=_SAMPLE
            )
    return dict(table)
