"""The rim towards torch and transformers: checkpoints, fingerprints, tokens, prefill, cache classes.

What both a publisher and a client need of a model. Modules that need torch import it themselves; `checkpoint` and
`fingerprint` do without.
"""
