"""Tariffs of the package genai-prices: what an API charges for input tokens, from the prices that the package carries.

Nothing is fetched: the data are as old as the installed version, which the source tells. Prices that hang on a prompt's length
or on the hour are those of the prompt and hour asked for.
"""

from __future__ import annotations

from datetime import UTC, datetime

from kvcdn.economics.prices import Tariff
from kvcdn.errors import UsageError

PREFIX = "genai:"
"""Begins the name of a tariff that is to be looked up: genai:MODEL, or genai:PROVIDER/MODEL."""


def genai_tariff(name: str, tokens: int, at: datetime | None = None) -> Tariff:
    """The tariff of a prompt of `tokens` tokens, at `at` or now, all of it read from the cache or none.

    Raises UsageError without the package, and for a model that it does not know.
    """
    try:
        import genai_prices  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "genai_prices":
            raise
        raise UsageError(f"{name} needs genai-prices, which is not installed", hint="pip install 'kvcdn[prices]'") from None
    provider, _, model = name.removeprefix(PREFIX).rpartition("/")
    at = at or datetime.now(UTC)
    try:
        plain, cached = (
            genai_prices.calc_price(
                genai_prices.Usage(input_tokens=tokens, cache_read_tokens=read),
                model,
                provider_id=provider or None,
                genai_request_timestamp=at,
            )
            for read in (0, tokens)
        )
    except LookupError as error:
        raise UsageError(
            f"genai-prices {genai_prices.__version__}: {error}", hint="genai:MODEL, or genai:PROVIDER/MODEL"
        ) from None
    version = f"genai-prices {genai_prices.__version__}: {plain.provider.id}, {plain.model.id}, at {at:%H} h UTC"
    per_million = 1e6 / tokens
    return Tariff(
        name, float(plain.input_price) * per_million, float(cached.input_price) * per_million, version, f"{at:%Y-%m-%d}"
    )
