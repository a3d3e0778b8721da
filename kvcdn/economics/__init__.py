"""Whether delivering a KV cache pays: models, prices, devices and links as dated data, and the arithmetic over them.

Pure computation: nothing here measures, reads a file or talks to a network. `kvcdn.economics.case.Case` holds every
assumption; `costs`, `timing` and `thresholds` compute from it; `paper` is one published case; `report` makes the tables
of docs/economics.md. Money is in US dollars, sizes in bytes, a GB is 10^9 bytes, times in seconds.
"""
