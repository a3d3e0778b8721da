"""Digests, tags and secrets: one text form, fixed sizes, and secrets that never show."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.digest import PARALLEL_FROM_BYTES, Digest, FixedBytes, ModelTag, Secret, hash_bytes
from kvcdn.errors import CorruptError
from kvcdn.keys import BlockName, ModelIdentity, Namespace, PrefixNames
from kvcdn.layout import Layout
from kvcdn.seal import ObjectKeys
from kvcdn.signing import PublicKey, SigningKey

SECRET = Secret(bytes(range(0x40, 0x60)))

ALL_KINDS = [Digest, ModelTag, Secret, PublicKey]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_text_form_reads_back(kind: type[FixedBytes]) -> None:
    """Lowercase hexadecimal of the exact length is read."""
    value = kind(bytes(range(kind.SIZE)))
    assert value == kind.parse(value.hex(), "field")


@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=50, deadline=None)
@given(value=st.text(max_size=80) | st.none() | st.integers() | st.binary() | st.lists(st.text()))
def test_other_values_are_refused(kind: type[FixedBytes], value: Any) -> None:
    """Any other value ends in CorruptError that names the field."""
    hexadecimal = isinstance(value, str) and len(value) == 2 * kind.SIZE and not set(value) - set("0123456789abcdef")
    if not hexadecimal:
        with pytest.raises(CorruptError, match=r"^field: expected"):
            kind.parse(value, "field")


@pytest.mark.parametrize(
    "text", ["AB" * 32, "0x" + "a" * 62, "\uff11" * 64, " " + "a" * 63, "a" * 63 + "\n", "a" * 65, "a" * 63]
)
def test_near_misses_are_refused(text: str) -> None:
    """What Python's own hexadecimal reader would forgive is refused."""
    with pytest.raises(CorruptError):
        Digest.parse(text, "field")


@pytest.mark.parametrize("size", [0, 31, 33])
def test_size_is_fixed(size: int) -> None:
    """No other number of bytes is a digest; a secret of wrong size is not shown."""
    with pytest.raises(CorruptError, match=f"not {size}"):
        Digest(bytes(size))
    with pytest.raises(CorruptError) as caught:
        Secret(b"@" * size)
    assert "@" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, PARALLEL_FROM_BYTES - 1, PARALLEL_FROM_BYTES, 3 * PARALLEL_FROM_BYTES + 1])
def test_parallel_hash_is_the_hash(size: int) -> None:
    """All cores or one: the same digest."""
    data = bytes(size)
    assert blake3(data).digest() == hash_bytes(data) == hash_bytes(memoryview(data), parallel=True)


def holders() -> dict[str, object]:
    """Everything in the core that holds a secret."""
    model = ModelIdentity(Digest(bytes(32)), Layout.uniform_kv(1, 1, 1, "float32"), "model")
    names = PrefixNames(model, (BlockName(0, 0, 1, Digest(bytes(32)), SECRET),), Digest(bytes(32)), 1)
    return {
        "secret": SECRET,
        "block name": names.blocks[0],
        "prefix names": names,
        "namespace": Namespace(bytes(SECRET), "team"),
        "object keys": ObjectKeys(SECRET, Digest(bytes(32))),
        "in a list": [SECRET],
        "in a dict": {"key": SECRET},
    }


@pytest.mark.parametrize("holder", holders().values(), ids=holders().keys())
def test_secrets_never_show(holder: object, caplog: pytest.LogCaptureFixture) -> None:
    """No way of turning a value into text shows the secret inside it."""
    logging.getLogger("test").warning("%s %r", holder, holder)
    shown = [repr(holder), str(holder), f"{holder}", f"{holder!r}", "%s %r" % (holder, holder), caplog.text]  # noqa: UP031
    if isinstance(holder, Secret):
        shown += [format(holder, ""), ascii(holder), "{:}".format(holder)]  # noqa: UP032
    for text in shown:
        assert SECRET.hex() not in text
        assert "@ABCDEFG" not in text


def test_signing_key_shows_its_public_half_only() -> None:
    """A signing key in a log is its public key."""
    key = SigningKey.generate()
    private = key._key.private_bytes_raw().hex()
    assert key.public.text in repr(key)
    assert private not in repr(key) + str(key) + f"{key}"


def test_object_keys_hold_back_derived_keys() -> None:
    """The keys derived for one object do not show either."""
    keys = ObjectKeys(SECRET, Digest(bytes(32)))
    assert keys._raw_key.hex() not in repr(keys) + str(keys)
