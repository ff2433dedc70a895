"""Example inputs by name, and those that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError
from smcp_fx.tracing.example_inputs import as_inputs

IMAGE, MASK = torch.randn(2, 3, 8, 8), torch.rand(2, 1, 8, 8)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor, scale: float = 2.0, mask: Tensor | None = None) -> Tensor:
        found = self.last(self.first(image)) * scale
        return found if mask is None else found * mask


class ByName(Masked):
    def forward(self, image: Tensor, *, mask: Tensor) -> Tensor:
        return self.last(self.first(image)) * mask


class OfDict(Masked):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(self.first(batch["image"]))


def test_a_dict_is_taken_by_name_in_the_order_of_forward() -> None:
    model = Masked()
    assert as_inputs({"mask": MASK, "image": IMAGE}, model) == (IMAGE, 2.0, MASK)
    assert as_inputs({"image": IMAGE}, model) == (IMAGE,)
    prepared = smcp_fx.prepare(model, {"mask": MASK, "image": IMAGE})
    assert not prepared.channels["first"].pinned
    torch.testing.assert_close(prepared.eval()(image=IMAGE, mask=MASK), model.eval()(IMAGE, mask=MASK))


def test_a_dict_of_other_keys_is_one_argument() -> None:
    batch = {"image": IMAGE}
    assert as_inputs(batch, OfDict()) == (batch,)
    prepared = smcp_fx.prepare(OfDict(), batch)
    assert prepared(batch).shape == (2, 4, 8, 8)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (Masked(), {"image": IMAGE, "msk": MASK}, "do not fit Masked.forward.*msk"),
        (Masked(), {"mask": MASK}, "image"),
        (ByName(), {"image": IMAGE, "mask": MASK}, "takes mask by name only"),
    ],
)
def test_names_that_do_not_fit_are_told(model: nn.Module, inputs: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        smcp_fx.prepare(model, inputs)
