"""The channel graph: known answers, and slicing held against masking on networks of every kind."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from free_channels_page import KINDS, PAGE, entries, entry, page
from models import AWKWARD, IMAGE, Case, between, check_slicing, randomise, run
from prices import CheckedCost
from tolerances import assert_close

import smcp_fx

for kind in KINDS:
    importlib.import_module(kind)  # which registers its networks


@pytest.mark.filterwarnings("ignore:.* fuses weights in one mode alone")
@pytest.mark.parametrize("case", AWKWARD, ids=lambda case: case.name)
def test_awkward_network(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """Sliced exactly, as free as it is said to be, and with a price at any width."""
    prepared = check_slicing(case.build(), case.inputs(), cost=CheckedCost())
    assert "cannot be built" not in caplog.text
    assert prepared.channels.free_share == pytest.approx(case.free)
    assert entry(case, prepared) in entries(), "run tests/free_channels_page.py"


def test_the_record_tells_of_each_network_once_and_the_page_is_its() -> None:
    names = [(one["kind"], one["network"]) for one in entries()]
    assert len(names) == len(set(names)) == len(AWKWARD)
    assert PAGE.read_text(encoding="utf-8") == page(entries())


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
