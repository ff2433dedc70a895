"""Converted models for the tests of saved files."""

from __future__ import annotations

import pytest
from saved_models import resnet_model, small_model
from torch import fx


@pytest.fixture
def resnet() -> fx.GraphModule:
    return resnet_model()


@pytest.fixture
def small() -> fx.GraphModule:
    return small_model()
