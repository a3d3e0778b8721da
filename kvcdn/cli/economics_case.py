"""Options of `kvcdn economics` into a case: presets by name, numbers in their place, and files that hold either."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcdn.cli.genai_tariff import PREFIX, genai_tariff
from kvcdn.cli.small_file import read_text
from kvcdn.economics.case import LONGEST_TOKENS, Case, Speed, hourly
from kvcdn.economics.checks import known, number, whole
from kvcdn.economics.config import model_from_config
from kvcdn.economics.devices import Link
from kvcdn.economics.models import Attention, Model, plain
from kvcdn.economics.precisions import PRECISIONS, Precision
from kvcdn.economics.pricebook import PriceBook
from kvcdn.economics.prices import Store, Tariff
from kvcdn.economics.verdict import rounded
from kvcdn.errors import UsageError
from kvcdn.model.checkpoint import HUB_ALIASES

_MOST_DEVICES = 1 << 20

_LINK = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kMG]?)(bit|B)(?:/s|ps)?")

_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def case_of(given: dict[str, Any]) -> Case:
    """The case that the options, by their parameters' names, describe. Raises UsageError or NotFoundError."""
    book = PriceBook.presets()
    if given["prices"] is not None:
        book = book.with_toml(read_text(given["prices"]), str(given["prices"]))
    return _case(book, given)


def _case(book: PriceBook, given: dict[str, Any]) -> Case:
    number("--utilisation", given["utilisation"], positive=True, most=1)
    whole("--tokens", given["tokens"], least=1, most=LONGEST_TOKENS)
    measured = _measured(given["measured"])
    precision = known("precision", given["precision"], PRECISIONS)
    if measured:
        precision = Precision(precision.name, rounded(measured["ratio"]), f"measured: {given['measured']}")
    if given["stored_ratio"] is not None:
        precision = Precision(precision.name, given["stored_ratio"])
    store = replace(
        known("store", given["store"], book.stores),
        **_own(
            given,
            storage_usd="storage_usd_per_gb_month",
            request_usd="read_usd_per_1000",
            write_usd="write_usd_per_1000",
            egress_usd="egress_usd_per_gb",
        ),
    )
    delivery = replace(known("delivery", given["delivery"], book.deliveries), **_own(given, edge_usd="egress_usd_per_gb"))
    tariff = replace(
        _tariff(book, given["tariff"], given["tokens"] + given["question_tokens"]),
        **_own(given, input_usd="input_usd_per_million", cached_usd="cached_usd_per_million"),
    )
    model = _model(book, given, measured)
    return Case(
        model=model,
        precision=precision,
        speed=_speed(book, model, given, measured),
        store=store,
        delivery=delivery,
        zero_egress=_zero_egress(book, given["zero_egress"]),
        tariff=tariff,
        link=_link(book, given["link"], given["rtt"]),
        tokens=given["tokens"],
        question_tokens=given["question_tokens"],
        reads=given["reads"],
        days=given["days"],
        hit_ratio=given["hit_ratio"],
        retrain_days=given["retrain_days"],
        open_bytes_per_s=given["open_rate"],
        request_bytes=given["request_bytes"],
        gpu_waits=given["gpu_waits"],
    )


def _zero_egress(book: PriceBook, name: str) -> Store:
    found = known("store", name, book.stores)
    if found.egress_usd_per_gb:
        raise UsageError(
            f"--zero-egress {name} charges {found.egress_usd_per_gb:g} USD a GB for traffic", hint="give it to --store instead"
        )
    return found


def _tariff(book: PriceBook, name: str, tokens: int) -> Tariff:
    return genai_tariff(name, tokens) if name.startswith(PREFIX) else known("tariff", name, book.tariffs)


def _own(given: dict[str, Any], **fields: str) -> dict[str, Any]:
    """The prices given as options, by the names of the fields they replace."""
    own: dict[str, Any] = {}
    for option, field in fields.items():
        if given[option] is not None:
            own[field] = number("--" + option.replace("_", "-"), given[option])
    return {**own, "source": f"as the preset but for what was given: {', '.join(own)}"} if own else {}


def _model(book: PriceBook, given: dict[str, Any], measured: dict[str, float] | None) -> Model:
    name, per_token, parameters = given["model"], given["kv_bytes_per_token"], given["parameters"]
    if per_token is not None:
        number("--kv-bytes-per-token", per_token, positive=True, most=1e12)
    if parameters is not None:
        number("--parameters", parameters, positive=True, most=1e16)
    if name is None and per_token is None and measured:
        per_token = measured["bytes_per_token"]
    if name is None and per_token is not None:
        if parameters is None and given["prefill_rate"] is None and not measured:
            raise UsageError(
                "--kv-bytes-per-token alone says nothing about prefill",
                hint="add --parameters, --prefill-rate, or --model for the rest of a known model",
            )
        return plain("yours", per_token, parameters or 0.0, "given")
    model = _named(book, name or "qwen3-4b")
    if per_token is not None:
        width = sum(group.layers * group.width for group in model.attention)
        model = replace(model, attention=(Attention(1, per_token, width),), state_bytes=0.0, source=f"{model.source}; KV given")
    if parameters is not None:
        model = replace(model, active=parameters, parameters=max(parameters, model.parameters), source=f"{model.source}; given")
    return model


def _named(book: PriceBook, name: str) -> Model:
    """A known model, by its name or its hub id; a folder's config.json; or one that the hub's cache on this machine holds."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return model_from_config(_json(folder / "config.json"), folder.resolve().name)
    name = next((alias for alias, hub_id in HUB_ALIASES.items() if hub_id == name), name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return known("model", name, book.models)
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import, needed for hub ids only
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise UsageError(
            f"no model {name!r} is known, and the hub's cache on this machine holds no config.json of it",
            hint=f"hf download {name} config.json, or give a folder or a known name: {', '.join(sorted(book.models))}",
        )
    return model_from_config(_json(Path(cached)), name)


def _speed(book: PriceBook, model: Model, given: dict[str, Any], measured: dict[str, float] | None) -> Speed:
    device = known("device", given["device"], book.devices)
    count = given["devices"] if given["devices"] is not None else device.count_for(model)
    whole("--devices", count, least=1, most=_MOST_DEVICES)
    if given["gpu_hour"] is not None:
        number("--gpu-hour", given["gpu_hour"])
    hour, paid = hourly(device, given["gpu_hour"])
    price = (hour * count, f"{count} x {device.name}: {paid}")
    if given["prefill_rate"] is not None:
        return Speed.of_rate(model, given["tokens"], given["prefill_rate"], price)
    if measured:
        source = f"measured: {given['measured']}"
        return Speed.of_rate(model, int(measured["tokens"]), measured["tokens_per_s"], price, source)
    return Speed.of_device(device, count, given["utilisation"], given["gpu_hour"])


def _link(book: PriceBook, text: str, round_trip: float | None) -> Link:
    found = book.links.get(text)
    if found is None:
        match = _LINK.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"no link {text!r}", hint=f"known: {', '.join(sorted(book.links))}; or a speed such as 300Mbit/s")
        speed = float(match[1]) * _SCALE[match[2]] / (8 if match[3] == "bit" else 1)
        found = Link(text, speed, book.links["office"].round_trip_s, "speed given; round trip of an office link")
    return found if round_trip is None else replace(found, round_trip_s=round_trip, source=f"{found.source}; --rtt given")


def _measured(path: Path | None) -> dict[str, float] | None:
    """Rate, ratio and size from the JSON of `kvcdn publish --dry-run` or `kvcdn bench ttft`."""
    if path is None:
        return None

    values = _json(path)
    names = ("tokens", "measured_tokens", "tokens_per_second", "bytes_per_token", "ratio", "raw_bytes", "wire_bytes")
    kept = {name: values[name] for name in (*names, "prefill_ttft_s") if type(values.get(name)) in (int, float)}
    for name, value in kept.items():
        number(f"{path}: {name}", value, positive=True)
    if {"measured_tokens", "tokens_per_second", "bytes_per_token", "ratio"} <= set(kept):
        return {
            "tokens": kept["measured_tokens"],
            "tokens_per_s": kept["tokens_per_second"],
            "bytes_per_token": kept["bytes_per_token"],
            "ratio": kept["ratio"],
        }
    if {"tokens", "prefill_ttft_s", "raw_bytes", "wire_bytes"} <= set(kept):
        return {
            "tokens": kept["tokens"],
            "tokens_per_s": kept["tokens"] / kept["prefill_ttft_s"],
            "bytes_per_token": kept["raw_bytes"] / kept["tokens"],
            "ratio": kept["wire_bytes"] / kept["raw_bytes"],
        }
    raise UsageError(
        f"{path} holds no measurement", hint="kvcdn publish --dry-run --json writes one, and so does kvcdn bench ttft --json"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not hold a JSON object")
    return value
