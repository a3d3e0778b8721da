"""Names and keys: no two prefixes share one, whole blocks keep theirs, and every process computes the same."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcdn.digest import Digest, hash_bytes
from kvcdn.errors import UsageError
from kvcdn.keys import MAX_PREFIX_TOKENS, Chain, ModelIdentity, Namespace, PrefixNames, block_key, manifest_key
from kvcdn.layout import Layout
from kvcdn.store import check_key

LAYOUT = Layout.uniform_kv(1, 64, 1024, "float32")

N = LAYOUT.block_tokens

MODEL = ModelIdentity(hash_bytes(b"a model"), LAYOUT, "a model")

PUBLIC = Namespace.public()

TOKEN = st.sampled_from([0, 1, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)

PREFIX = st.lists(TOKEN, min_size=1, max_size=2 * N + 5)


@st.composite
def two_prefixes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two different prefixes that are likely to begin alike."""
    first = draw(PREFIX)
    kept = draw(st.integers(0, len(first)))
    second = first[:kept] + draw(st.lists(TOKEN, max_size=N))
    if not second or second == first:
        second = [*first, draw(TOKEN)]
    return first, second


def test_block_length_of_these_tests() -> None:
    """The layout here has the smallest block length, so that short lists have several blocks."""
    assert N == 64


@settings(max_examples=150, deadline=None)
@given(two_prefixes())
def test_addresses_name_exactly_one_prefix(pair: tuple[list[int], list[int]]) -> None:
    """Blocks of two prefixes have one address if and only if all tokens up to their end are the same."""
    first, second = pair
    a, b = PrefixNames.of(MODEL, PUBLIC, first), PrefixNames.of(MODEL, PUBLIC, second)
    for left in a.blocks:
        for right in b.blocks:
            same = first[: left.end] == second[: right.end]
            assert same == (left.address == right.address)
            assert same == (left.content_key == right.content_key)
    assert a.manifest_address != b.manifest_address


@settings(max_examples=50, deadline=None)
@given(PREFIX, st.lists(TOKEN, min_size=1, max_size=N + 1))
def test_longer_prefix_keeps_whole_blocks(tokens: list[int], more: list[int]) -> None:
    """Appending to a document keeps the names of its whole blocks, and of no others."""
    whole = len(tokens) // N
    before = PrefixNames.of(MODEL, PUBLIC, tokens).blocks
    after = PrefixNames.of(MODEL, PUBLIC, tokens + more).blocks
    assert before[:whole] == after[:whole]
    assert not {block.address for block in before[whole:]} & {block.address for block in after}


@settings(max_examples=50, deadline=None)
@given(PREFIX)
def test_every_name_of_a_prefix_is_another(tokens: list[int]) -> None:
    """Addresses, content keys and the manifest's address are all different: none reveals another."""
    names = PrefixNames.of(MODEL, PUBLIC, tokens)
    everything = [names.manifest_address, *(b.address for b in names.blocks), *(b.content_key for b in names.blocks)]
    assert len(everything) == len(set(everything))
    assert len(tokens) == sum(block.tokens for block in names.blocks) == names.blocks[-1].end == names.tokens


OTHERS = {
    "another secret": (MODEL, Namespace.private("b", b"b" * 32)),
    "public": (MODEL, PUBLIC),
    "another model": (ModelIdentity(hash_bytes(b"another"), LAYOUT, "a model"), Namespace.private("a", b"a" * 32)),
    "another layout": (
        ModelIdentity(MODEL.fingerprint, Layout.uniform_kv(1, 64, 1024, "float32", 1023), "a model"),
        Namespace.private("a", b"a" * 32),
    ),
}


@pytest.mark.parametrize(("model", "namespace"), OTHERS.values(), ids=OTHERS.keys())
def test_other_worlds_share_nothing(model: ModelIdentity, namespace: Namespace) -> None:
    """The same tokens have no name in common between namespaces, models or layouts."""
    ours = PrefixNames.of(MODEL, Namespace.private("a", b"a" * 32), list(range(3 * N)))
    theirs = PrefixNames.of(model, namespace, list(range(3 * N)))
    assert not {b.address for b in ours.blocks} & {b.address for b in theirs.blocks}
    assert not {b.content_key for b in ours.blocks} & {b.content_key for b in theirs.blocks}
    assert ours.manifest_address != theirs.manifest_address


def test_names_follow_from_what_matters_only() -> None:
    """The name of a model or a namespace is a label: it changes no address."""
    renamed = ModelIdentity(MODEL.fingerprint, LAYOUT, "other words")
    secret = bytes(range(32))
    ours = PrefixNames.of(MODEL, Namespace.private("a", secret), [1, 2, 3])
    theirs = PrefixNames.of(renamed, Namespace.private("b", secret), [1, 2, 3])
    assert ours.blocks == theirs.blocks


@pytest.mark.parametrize(
    "kind", [tuple, bytes, bytearray, lambda ids: array("H", ids), np.array, lambda ids: np.array(ids, "uint8")]
)
def test_kind_of_sequence_does_not_matter(kind: object) -> None:
    """Token ids count, not the sequence that holds them."""
    ids = [index % 256 for index in range(N + 9)]
    assert callable(kind)
    assert PrefixNames.of(MODEL, PUBLIC, ids) == PrefixNames.of(MODEL, PUBLIC, kind(ids))


@pytest.mark.parametrize(
    "token_ids",
    [[], [-1], [2**32], [1.0], ["1"], [None], "12", [1, 2**64], range(MAX_PREFIX_TOKENS + 1)],
    ids=["empty", "negative", "2^32", "float", "text", "none", "a-string", "2^64", "too-long"],
)
def test_no_prefix(token_ids: list[int]) -> None:
    """What is no sequence of 1 to 2^24 ids below 2^32 is a misuse, told in words."""
    with pytest.raises(UsageError, match="token"):
        PrefixNames.of(MODEL, PUBLIC, token_ids)


@settings(max_examples=50, deadline=None)
@given(PREFIX, st.data())
def test_chain_names_every_prefix(tokens: list[int], data: st.DataObject) -> None:
    """A chain, hashed once, names a prefix as the prefix alone would be named."""
    length = data.draw(st.integers(1, len(tokens)))
    assert PrefixNames.of(MODEL, PUBLIC, tokens[:length]) == Chain(MODEL, PUBLIC, tokens).prefix(length)


@pytest.mark.parametrize("length", [0, -1, 71, 80, 1000])
def test_chain_has_no_prefix_beyond_itself(length: int) -> None:
    """Asked for more tokens than there are, a chain refuses, rather than name a block by the tokens it has."""
    with pytest.raises(UsageError, match="no prefix"):
        Chain(MODEL, PUBLIC, list(range(70))).prefix(length)


def test_short_secret_is_refused() -> None:
    """A namespace secret under 32 bytes could be guessed; the message says how to make one and does not show it."""
    with pytest.raises(UsageError, match="31 bytes") as caught:
        Namespace.private("team", b"S3CR3T." + bytes(24))
    assert "S3CR3T" not in str(caught.value)
    assert "kvcdn keygen" in caught.value.hint


def test_object_keys_fit_every_store() -> None:
    """Object keys are what FORMAT.md 2.6 says, and names that every store takes."""
    address = Digest(bytes(range(32)))
    assert f"v1/{MODEL.tag}/blocks/00/{bytes(range(32)).hex()}" == check_key(block_key(MODEL.tag, address))
    assert f"v1/{MODEL.tag}/manifests/{bytes(range(32)).hex()}" == check_key(manifest_key(MODEL.tag, address))


PROGRAM = """
from kvcdn.digest import hash_bytes
from kvcdn.keys import ModelIdentity, Namespace, PrefixNames
from kvcdn.layout import Layout
model = ModelIdentity(hash_bytes(b"a model"), Layout.uniform_kv(1, 64, 1024, "float32"), "a model")
names = PrefixNames.of(model, Namespace.private("n", b"s" * 32), [7 * i for i in range(200)])
print(names.manifest_address, *(b.address for b in names.blocks), *(b.content_key.hex() for b in names.blocks))
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_same_names_in_every_process(hash_seed: str) -> None:
    """Another process, with another hash seed, computes the same names."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    names = PrefixNames.of(MODEL, Namespace.private("n", b"s" * 32), [7 * index for index in range(200)])
    expected = [names.manifest_address, *(b.address for b in names.blocks), *(b.content_key.hex() for b in names.blocks)]
    assert [str(name) for name in expected] == done.stdout.split()
