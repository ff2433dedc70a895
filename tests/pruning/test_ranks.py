"""What ranks tell each other, without other ranks; tests with several processes are in test_distributed.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smcp_fx.errors import TrainingError
from smcp_fx.pruning import ranks


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


class Store:
    """A job's store in which these ranks have answered; None: it went down with the rank that kept it."""

    def __init__(self, here: set[int] | None) -> None:
        self.here = here

    def set(self, key: str, value: str) -> None:
        if self.here is None:
            raise RuntimeError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        return int(keys[0].rpartition("/")[2]) in (self.here or ())


@pytest.mark.parametrize(
    ("world", "here", "lost"),
    [
        (2, set(), "rank 0 has died or hangs"),
        (3, {0}, "rank 2 has died or hangs"),
        (4, {0}, "one of the ranks 2, 3 that do not answer has died or hangs"),
        (3, {0, 2}, "one has died or hangs"),
        (3, None, "rank 0 has died or hangs, or has ended because another rank had died"),
    ],
)
def test_the_rank_that_is_lost_is_named(
    world: int, here: set[int] | None, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_ROLL_CALL", 0.05)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: world)
    monkeypatch.setattr(ranks.dist.distributed_c10d, "_get_default_store", lambda: Store(here))
    with (
        pytest.raises(TrainingError, match=f"rank 1 of {world} cannot reach the others: {lost}"),
        ranks._explained(),
    ):
        raise RuntimeError("Connection closed by peer")
