"""The channel graph: known answers, and slicing held against masking on networks of every kind."""

from __future__ import annotations

import itertools

import models_broadcasts  # noqa: F401  (these register their networks)
import models_filled  # noqa: F401
import models_folded  # noqa: F401
import models_generated  # noqa: F401
import models_layers  # noqa: F401
import models_learned  # noqa: F401
import models_mixed  # noqa: F401
import models_movement  # noqa: F401
import models_overwritten  # noqa: F401
import models_places  # noqa: F401
import models_products  # noqa: F401
import models_recurrent  # noqa: F401
import models_running  # noqa: F401
import models_shapes  # noqa: F401
import models_spectra  # noqa: F401
import models_stacks  # noqa: F401
import models_statistics  # noqa: F401
import models_weights  # noqa: F401
import models_windows  # noqa: F401
import models_wiring  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from free_channels_page import line, lines
from models import AWKWARD, IMAGE, Case, between, check_slicing, randomise, run
from tolerances import assert_close

import smcp_fx


@pytest.mark.filterwarnings("ignore:.* fuses weights in one mode alone")
@pytest.mark.parametrize("case", AWKWARD, ids=lambda case: case.name)
def test_awkward_network(case: Case) -> None:
    prepared = check_slicing(case.build(), case.inputs(), seeds=(0, 1))
    assert prepared.channels.free_share == pytest.approx(case.free)
    assert line(case, prepared.channels) in lines(), "run tests/free_channels_page.py"


def test_the_page_tells_of_each_network_once() -> None:
    assert len(lines()) == len(AWKWARD)


@pytest.mark.parametrize("amount", [1, 6, 7])
def test_channels_that_share_a_unit_are_told_apart_where_they_roll(amount: int) -> None:
    """Four channels of one unit, which the roll parts: every choice of units, not only what luck masks."""
    model = randomise(between(lambda s, h: torch.roll(F.pixel_unshuffle(h, 2), amount, 1), 3, 12))
    image = torch.randn(IMAGE)
    prepared = smcp_fx.prepare(model.eval(), image, config=smcp_fx.PruningConfig(multiple=1))
    (group,) = (g for g in prepared.channels.groups if g.free)
    for keep in itertools.product([False, True], repeat=3):
        if any(keep):
            prepared.set_masks({group.name: torch.tensor(keep)})
            assert_close(
                run(smcp_fx.convert(prepared), (image,)), run(prepared, (image,)), "slicing", str(keep)
            )
