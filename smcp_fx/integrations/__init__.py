"""Adapters for training frameworks; none of the frameworks is a dependency."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Load a framework's module on first access: `smcp_fx.integrations.lightning`."""
    if name in ("lightning", "ultralytics"):
        return importlib.import_module(f"smcp_fx.integrations.{name}")
    raise AttributeError(f"module 'smcp_fx.integrations' has no attribute {name!r}")
