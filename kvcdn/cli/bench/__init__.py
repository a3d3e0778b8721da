"""Benchmarks: what is measured, on what rig, beside whom, and the page that is made of it."""
