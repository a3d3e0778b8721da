"""Lossy codecs: arrays of numbers to few bytes and back (FORMAT.md 4.4 and 4.5). Loaded late: an edge never decodes."""
