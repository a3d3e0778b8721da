"""kvcdn: a prefill CDN. This package is the core: names, bytes, keys and stores; it imports neither torch nor a client.

The rooms around it are `kvcdn.origin` (publish), `kvcdn.edge` (serve) and `kvcdn.client` (fetch and inject); ARCHITECTURE.md
is the map.
"""

__version__ = "0.1.0"
