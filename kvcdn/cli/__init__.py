"""The commands: the only place that knows origin, edge and client together. Each module is one command or a few of a kind.

Modules here import torch and the packages inside their functions, so that `kvcdn --help` is quick and an edge needs no torch.
"""
