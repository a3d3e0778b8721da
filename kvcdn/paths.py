"""Where kvcdn keeps its own files, after the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """What can be made again: converted models, remembered fingerprints. `$XDG_CACHE_HOME/kvcdn` or `~/.cache/kvcdn`."""
    return _base("XDG_CACHE_HOME", ".cache")


def config_dir() -> Path:
    """What cannot: signing keys, trust list, namespace secrets. `$XDG_CONFIG_HOME/kvcdn` or `~/.config/kvcdn`."""
    return _base("XDG_CONFIG_HOME", ".config")


def data_dir() -> Path:
    """The default folder origin. `$XDG_DATA_HOME/kvcdn` or `~/.local/share/kvcdn`."""
    return _base("XDG_DATA_HOME", ".local/share")


def _base(variable: str, fallback: str) -> Path:
    configured = Path(os.environ.get(variable, ""))
    base = configured if configured.is_absolute() else Path.home() / fallback
    return base / "kvcdn"
