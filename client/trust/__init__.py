"""Whom a client believes: publishers' keys, revocations, the canary before a first use, and audits by chance."""
