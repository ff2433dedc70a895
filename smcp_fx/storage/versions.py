"""Versions of the libraries that a saved file depends on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

_LIBRARIES = ("smcp_fx", "torch", "torchvision", "timm", "safetensors")


def library_versions() -> dict[str, str]:
    """Return the library versions that a saved file depends on."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def saved_with(manifest: Mapping[str, Any]) -> str:
    """Return the versions that a manifest lists under "libraries", in brackets."""
    libraries = manifest.get("libraries")
    if not isinstance(libraries, dict):
        return "(saved with unknown versions)"
    versions = ", ".join(f"{name} {version}" for name, version in libraries.items())
    return f"(saved with {versions[:200]})"
