"""What a publisher does to each tensor: more bits where fewer would do the most harm."""

from __future__ import annotations

import numpy as np

from kvcdn.codec import Encoded, Rows
from kvcdn.codecs.choice import FINE_SHARE, GridEncoder, choose_fine, grid_harm, grid_weights, recent_tokens
from kvcdn.codecs.quant import Grid, encode_grid
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


def test_worth_of_rows() -> None:
    """It grows with the gradient; rows that few have read count for much; without gradients all are alike."""
    slopes = np.ones((300, 2, 16), np.float32)
    slopes[10] = 8
    slopes[20] = 0
    weights = grid_weights(slopes, 400)
    assert (400,) == weights.shape
    assert 1.0 == weights.max() == weights[10]
    assert 0 < weights[20] < weights[30] < weights[300] == weights[399] < 1
    assert (grid_weights(np.zeros((300, 2, 16), np.float32), 400) == 1).all()
    assert (grid_weights(np.zeros((0, 2, 16), np.float32), 5) == 1).all()


def test_each_block_has_its_own_rows_worth() -> None:
    """The encoder of a document gives the second block the weights of the second block, and 8 bits take none."""
    names = PrefixNames.of(make_model(layers=30, heads=2, dim=16), Namespace.public(), range(1100)).blocks
    length = names[0].tokens
    weights = np.exp(RNG.normal(size=1100)).astype(np.float32)
    encoder = GridEncoder(LAYOUT, "int4", 1100, frozenset({(7, 1)}), {(7, 0): weights, (7, 1): weights})
    raw = rows(names[1].tokens)
    shape = Rows("bfloat16", (names[1].tokens, 2, 16))
    for tensor, bits in ((0, 4), (1, 8)):
        found = encoder.encode(raw, 7, tensor, names[1])
        assert isinstance(found, Encoded)
        trail = found.data[3]
        grid = Grid(bits, int.from_bytes(found.data[4:6], "little"), 1, centred=False, trail=trail)
        expected = encode_grid(raw, shape, grid, weights[length:] if bits == 4 else None)
        assert expected is not None
        assert expected.data == found.data


def test_the_last_rows_are_exact_in_proportion() -> None:
    """Up to 16, and with the first 4 no more than five in 256 rows: nowhere do they fill the bytes of a short document."""
    assert [0, 0, 0, 1, 6, 16, 16] == [recent_tokens(tokens) for tokens in (1, 17, 204, 256, 512, 1024, 100_000)]
