"""Shared set-up: one thread, and a fixed seed for every test."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# Hypothesis limits how long examples take to draw; a busy machine must not fail a test.
settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")

#: As modules with doctests these would have one name.
collect_ignore_glob = ["*conftest.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the first test of each file that is not slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        first = {item.path: item for item in reversed(items) if not item.get_closest_marker("slow")}
        items[:] = [item for item in items if first.get(item.path) is item]


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Every test starts from the same generator state, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _operators_listed_once() -> Iterator[None]:
    """torch lists the operators that it can export anew for every file, which takes as long as the export."""
    plain = torch.onnx.export

    def export(*given: Any, **options: Any) -> Any:
        _list_once()
        return plain(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", export)
        yield


@functools.cache
def _list_once() -> None:
    utils = importlib.import_module("torch._export.utils")
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)


@pytest.fixture(autouse=True, scope="session")
def _however_busy() -> Iterator[None]:
    """Tests run beside each other, and judge no latency: to them every machine is quiet, as early as in fixtures.

    No core is waited for, either, which beside other tests takes half of the time of each row.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smcp_fx.backends.timing.quiet.core_share", lambda: 1.0)
        for asked in ("await_usual", "is_usual"):
            patch.setattr(f"smcp_fx.backends.timing.pace.Pace.{asked}", lambda _: True)
        yield
