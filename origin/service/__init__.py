"""The prefill service: its HTTP interface, its settings, and its workers, here or on a Ray cluster."""
