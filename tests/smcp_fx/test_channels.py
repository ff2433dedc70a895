"""The channel graph: known answers, and slicing held against masking on networks of every kind."""

from __future__ import annotations

import models_layers  # noqa: F401  (these register their networks)
import models_movement  # noqa: F401
import models_products  # noqa: F401
import models_shapes  # noqa: F401
import models_wiring  # noqa: F401
import pytest
from models import AWKWARD, Case, check_slicing


@pytest.mark.parametrize("case", AWKWARD, ids=lambda case: case.name)
def test_awkward_network(case: Case) -> None:
    prepared = check_slicing(case.build(), case.inputs(), seeds=(0, 1))
    assert prepared.channels.free_share == pytest.approx(case.free)
