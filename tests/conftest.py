"""Shared set-up: one thread, a fixed seed for every test, and the installed package, not this folder's name."""

from __future__ import annotations

import sys
from pathlib import Path

# pytest puts this folder on the path, where `smcp_fx/` (the tests of that package) looks like a namespace
# package and would hide an editable install. Import the real one while the folder is out of the way.
_HERE = str(Path(__file__).parent)
_PATH = sys.path[:]
sys.path[:] = [entry for entry in sys.path if entry != _HERE]
import smcp_fx  # noqa: E402, F401

sys.path[:] = _PATH

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# How long examples take to make says how busy the machine is, and nothing of the code.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Every test starts from the same generator state, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _however_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside each other, and judge no latency: to them every machine is quiet."""
    monkeypatch.setattr("smcp_fx.backends.quiet.core_share", lambda: 1.0)
