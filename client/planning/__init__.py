"""Whether to fetch, to compute, or both: decided from what was measured, and again while it runs."""
