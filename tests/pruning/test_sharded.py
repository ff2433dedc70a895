"""Parameters that FSDP shards: refused in words, wherever they turn up; what is pruned can be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Residual, randomise
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import smcp_fx
from smcp_fx.errors import TrainingError

X = torch.randn(2, 3, 8, 8)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One rank, on the CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def prepared_model() -> smcp_fx.PreparedModel:
    return smcp_fx.prepare(randomise(Residual(16, 24)), X, target=0.5)


def stepped(prepared: smcp_fx.PreparedModel) -> smcp_fx.PreparedModel:
    prepared.train()(X).square().mean().backward()
    prepared.pruner.step()
    return prepared


def of_one_part(mesh: DeviceMesh) -> Any:
    prepared = prepared_model()
    part = next(module for module in prepared.modules() if isinstance(module, nn.Conv2d))
    fully_shard(part, mesh=mesh)
    return stepped(prepared)


@pytest.mark.parametrize(
    "action",
    [
        lambda mesh: stepped(fully_shard(prepared_model(), mesh=mesh)),
        of_one_part,
        lambda mesh: smcp_fx.convert(fully_shard(stepped(prepared_model()), mesh=mesh)),
        lambda mesh: smcp_fx.prepare(fully_shard(Residual(16, 24), mesh=mesh), X),
        lambda mesh: smcp_fx.gather_importance(fully_shard(prepared_model(), mesh=mesh), X),
    ],
    ids=["step", "a part", "convert", "prepare", "gather"],
)
def test_what_fsdp_shards_is_refused(mesh: DeviceMesh, action: Callable[[DeviceMesh], Any]) -> None:
    with pytest.raises(TrainingError, match=r"sharded, by FSDP.* DistributedDataParallel; .* fully_shard"):
        action(mesh)


def test_what_is_pruned_can_be_sharded(mesh: DeviceMesh) -> None:
    prepared = stepped(prepared_model())
    prepared.pruner.solve()
    smaller = fully_shard(smcp_fx.convert(prepared).train(), mesh=mesh)
    smaller(X).square().mean().backward()
    assert all(parameter.grad is not None for parameter in smaller.parameters())
    for verb in (smcp_fx.Teacher, lambda m: smcp_fx.resize(m, m), lambda m: smcp_fx.repair(m, prepared, X)):
        with pytest.raises(TrainingError, match=r"by FSDP, and .* needs them whole: call it before"):
            verb(smaller)
