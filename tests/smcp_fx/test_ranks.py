"""What ranks tell each other, without other ranks; tests with several processes are in test_distributed.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smcp_fx import ranks
from smcp_fx.errors import TrainingError


def test_alone_nothing_is_sent() -> None:
    assert not ranks.distributed() and ranks.rank() == 0
    tensor = torch.arange(3.0)
    assert ranks.broadcast(tensor) is tensor
    assert torch.equal(ranks.mean_over_ranks(tensor.clone()), tensor)
    message = {"a": [1, None]}
    assert ranks.broadcast_json(message, torch.device("cpu")) is message
    assert ranks.gather_bytes(b"abc", torch.device("cpu")) == [b"abc"]
    ranks.check_same("1", "masks", torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_digest_tells_one_element_and_the_order(dtype: torch.dtype) -> None:
    masks = [torch.ones(4, 1, 3).to(dtype), torch.zeros(5).to(dtype)]
    same = [mask.clone() for mask in masks]
    assert ranks.digest(masks) == ranks.digest(same)
    same[0][2, 0, 1] = 0
    assert ranks.digest(masks) != ranks.digest(same)
    assert ranks.digest(masks) != ranks.digest(masks[::-1])
    assert len(ranks.digest(masks)) == 16


def test_different_masks_are_an_error_that_names_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(content: bytes, device: Any) -> list[bytes]:
        return [content, b"other", content]

    monkeypatch.setattr(ranks, "gather_bytes", gathered)
    with pytest.raises(TrainingError, match=r"different masks \(rank 0: mine, rank 1: other, rank 2: mine\)"):
        ranks.check_same("mine", "masks", torch.device("cpu"))
    monkeypatch.setattr(ranks, "gather_bytes", lambda content, device: [content, content])
    ranks.check_same("mine", "masks", torch.device("cpu"))
