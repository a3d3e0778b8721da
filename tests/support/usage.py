"""Usage for tests: any entries at all, as hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcdn.accounting.entry import COUNTS, LAST_HOUR, Entry, Key, Loss, Outcome, Part

KEYS = st.builds(
    Key,
    part=st.sampled_from(list(Part)),
    hour=st.integers(0, LAST_HOUR),
    tenant=st.sampled_from(["", "acme", "bolt@example.org"]),
    model=st.sampled_from(["", "ab" * 16]),
    document=st.sampled_from(["", "cd" * 32, "ef" * 32]),
    prompt=st.sampled_from(["", "12" * 16, "34" * 16]),
    outcome=st.sampled_from(list(Outcome)),
    loss=st.sampled_from(list(Loss)),
    reason=st.sampled_from(["", "not-found"]),
)

ENTRIES = st.builds(
    Entry, KEYS, st.dictionaries(st.sampled_from(sorted(COUNTS)), st.integers(0, 1 << 40), min_size=1, max_size=4)
)
