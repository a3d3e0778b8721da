"""What a publisher does to each tensor: more bits where fewer would do the most harm."""

from __future__ import annotations

import numpy as np

from kvcdn.codec import Encoded
from kvcdn.codecs.choice import FINE_SHARE, GridEncoder, choose_fine, grid_harm
from kvcdn.keys import Namespace, PrefixNames
from kvcdn.layout import Layout
from support.blocks import make_model

LAYOUT = Layout.uniform_kv(30, 2, 16, "bfloat16")

RNG = np.random.default_rng(11)


def rows(tokens: int) -> bytes:
    """Real numbers, as bfloat16."""
    return bytes((RNG.normal(size=(tokens, 2, 16)).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())


def test_the_most_harmful_are_fine() -> None:
    """As many as the share of bytes allows, for the harm that a byte takes away; without figures, as many all the same."""
    harms = {(layer, tensor): 1.0 for layer in range(30) for tensor in range(2)}
    worst = {(3, 1), (10, 0), (18, 0)}
    harms |= dict.fromkeys(worst, 2.0)
    assert worst == choose_fine(LAYOUT, harms)
    assert len(worst) == round(FINE_SHARE * 60) == len(choose_fine(LAYOUT, {}))


def test_no_tensor_of_a_small_model_is_fine() -> None:
    """One of four would be more than the share."""
    assert not choose_fine(Layout.uniform_kv(2, 2, 16, "bfloat16"), {(0, 0): 1.0})


def test_harm_is_where_rows_are_read() -> None:
    """It grows with the square of the gradient, and counts no row that hardly anybody has read."""
    raw, spec = rows(400), LAYOUT.layers[0].tensors[0]
    slopes = RNG.normal(size=(300, 2, 16)).astype(np.float32)
    harm = grid_harm(raw, spec, slopes)
    assert harm > 0
    assert 0.999 < grid_harm(raw, spec, 2 * slopes) / (4 * harm) < 1.001
    late = np.zeros_like(slopes)
    late[-64:] = 1e3
    assert 0.0 == grid_harm(raw, spec, late)


def test_fine_tensors_have_twice_the_bits() -> None:
    """And nearly twice the bytes; in int8 all have them."""
    (name,) = PrefixNames.of(make_model(layers=30, heads=2, dim=16), Namespace.public(), range(300)).blocks
    raw = rows(300)
    encoder = GridEncoder(LAYOUT, "int4", 300, frozenset({(7, 1)}))
    coarse, fine = (encoder.encode(raw, 7, tensor, name) for tensor in (0, 1))
    eight = GridEncoder(LAYOUT, "int8", 300).encode(raw, 7, 0, name)
    assert isinstance(coarse, Encoded)
    assert isinstance(fine, Encoded)
    assert isinstance(eight, Encoded)
    assert (4, 8, 8) == (coarse.data[0], fine.data[0], eight.data[0])
    assert 1.6 < len(fine.data) / len(coarse.data) < 2
