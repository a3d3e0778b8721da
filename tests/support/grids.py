"""Grids of every shape, for properties of codecs."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcdn.codecs.quant import Grid

GRIDS = st.builds(
    Grid,
    st.sampled_from([4, 8]),
    st.integers(1, 50),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 4),
)
