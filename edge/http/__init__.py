"""HTTP without a cache: what requests ask for, how answers look, and how files become bodies."""
