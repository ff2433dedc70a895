"""Models that FSDP shards are refused in words, what is pruned can be sharded; wrappers are taken off."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Residual, randomise
from tolerances import assert_close
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

import smcp_fx
from smcp_fx.errors import InputError, TrainingError

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


def test_what_is_pruned_can_be_sharded(mesh: DeviceMesh, tmp_path: Path) -> None:
    prepared = stepped(prepared_model())
    prepared.pruner.solve()
    smaller = fully_shard(smcp_fx.convert(prepared).train(), mesh=mesh)
    smaller(X).square().mean().backward()
    assert all(parameter.grad is not None for parameter in smaller.parameters())
    for verb in (
        smcp_fx.Teacher,
        lambda m: smcp_fx.resize(m, m),
        lambda m: smcp_fx.resize(Residual(16, 24), m),
        lambda m: smcp_fx.repair(m, prepared, X),
        lambda m: smcp_fx.save(m, tmp_path / "m.safetensors"),
        lambda m: smcp_fx.export_onnx(m, X, tmp_path / "m.onnx"),
    ):
        with pytest.raises(
            TrainingError, match=r"by FSDP, and .* whole: call it before.*full_state_dict=True"
        ):
            verb(smaller)


def test_a_sharded_model_is_saved_as_the_error_says(mesh: DeviceMesh, tmp_path: Path) -> None:
    whole = smcp_fx.convert(smcp_fx.prepare(randomise(Residual(16, 24)), X), check=False)
    sharded = fully_shard(copy.deepcopy(whole).train(), mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(X).square().mean().backward()
    optimizer.step()
    whole.load_state_dict(get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True)))
    loaded = smcp_fx.load(smcp_fx.save(whole, tmp_path / "m.safetensors"))
    assert torch.equal(loaded.eval()(X), sharded.eval()(X))


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel,
     lambda m: nn.DataParallel(torch.compile(m, backend="eager"))],
)  # fmt: skip
def test_every_verb_takes_the_model_out_of_its_wrapper(mesh: DeviceMesh, tmp_path: Path, wrap: Any) -> None:
    model = randomise(Residual(16, 24))
    prepared = smcp_fx.prepare(wrap(model), X, check=False)
    assert [name for name, _ in prepared.named_parameters()] == [name for name, _ in model.named_parameters()]
    smaller = smcp_fx.convert(wrap(prepared), check=False)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    assert smcp_fx.carry_optimizer(optimizer, prepared, wrap(smaller)).param_groups
    loaded = smcp_fx.load(smcp_fx.save(wrap(smaller), tmp_path / "m.safetensors"))
    own = smcp_fx.resize(copy.deepcopy(model), wrap(smaller), X)
    for found in (loaded, own):
        assert_close(found.eval()(X), smaller.eval()(X), "slicing")
    for other in (smaller.state_dict(), None):
        with pytest.raises(InputError, match="save needs what smcp_fx"):
            smcp_fx.save(other, tmp_path / "m.safetensors")  # type: ignore[arg-type]
