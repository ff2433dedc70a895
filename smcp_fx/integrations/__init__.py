"""Callbacks for training frameworks; each module imports its framework, which is not a dependency."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Load a framework's module when it is asked for: `smcp_fx.integrations.lightning`."""
    if name == "lightning":
        return importlib.import_module("smcp_fx.integrations.lightning")
    raise AttributeError(f"module 'smcp_fx.integrations' has no attribute {name!r}")
