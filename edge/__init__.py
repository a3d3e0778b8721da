"""The edge: an HTTP cache node of immutable, content-addressed objects. It holds no keys and loads no tensor library.

`settings` says what an edge is told, `serve` runs one in this process, `launch` starts one as a process of its own.
"""
