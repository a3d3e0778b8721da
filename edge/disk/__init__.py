"""The cache on disk: one file an object, a hard cap, and the accounting of what leaves."""
