"""`torch.save` and pickle of converted models: they load in a new process and compute the same in both modes."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saved_models import FunctionalNetwork, SharedModules, assert_same_module, prune_and_convert, small_model
from torch import Tensor, fx, nn

import smcp_fx
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.prepare import sliced
from smcp_fx.serialization.converted import retraces_the_same
from smcp_fx.serialization.saving import check_savable, load, save

SCRIPT = """
import sys, torch
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    module = torch.load(folder + "/model.pt", weights_only=False)
    x, expected, trained = torch.load(folder + "/values.pt")
    torch.testing.assert_close(module.eval()(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.train()(x), trained, rtol=1e-5, atol=1e-5)
    print(any(name.startswith("smcp_fx") for name in sys.modules))
"""


class ReadsItsMode(nn.Module):
    """A batch norm by function, its flag read from the module each time, and a function that is a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.batch_norm(self.first(x), self.mean, self.variance, training=self.training)
        return self.second(nn.functional.max_pool2d(x, 2))


def test_a_new_process_loads_them(tmp_path: Path) -> None:
    """What comes back the same by torch.fx alone, which is loaded first, needs nothing of this library."""
    x = torch.randn(2, 3, 8, 8)
    folders = []
    for network, alone in ((SharedModules, True), (ReadsItsMode, False)):
        converted = prune_and_convert(network(), x)
        assert retraces_the_same(converted) is alone
        folder = tmp_path / network.__name__
        folder.mkdir()
        torch.save(converted, folder / "model.pt")
        outputs = [copy.deepcopy(converted).train(mode)(x).detach() for mode in (False, True)]
        torch.save((x, *outputs), folder / "values.pt")
        folders.append(str(folder))
    run = subprocess.run([sys.executable, "-c", SCRIPT, *folders], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["False", "True"]


def test_pickle_leaves_nothing_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    for module, inputs in ((small_model(), (x,)), (prune_and_convert(FunctionalNetwork(), (x, 0.5)), (x,))):
        assert_same_module(module, pickle.loads(pickle.dumps(module)), *inputs)
        twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(module))))
        assert torch.equal(first(twice.eval()(x)), first(copy.deepcopy(module).eval()(x)))


def first(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else first(value[0])


class WorksOutSizes(nn.Module):
    """Sizes by functions that torch.fx exchanges while it traces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        size = (int(x.shape[2] * 1.5), math.ceil(x.shape[3] / 2))
        return self.second(nn.functional.interpolate(self.first(x), size=size)) / np.prod(x.shape[2:])


def test_sizes_that_are_worked_out_are_saved_and_pickled(tmp_path: Path) -> None:
    x, larger = torch.randn(2, 3, 8, 8), torch.randn(3, 3, 10, 14)
    converted = prune_and_convert(WorksOutSizes(), x)
    for other in (
        load(save(converted, tmp_path / "model.safetensors")),
        pickle.loads(pickle.dumps(converted)),
    ):
        for image in (x, larger):
            assert torch.equal(converted.eval()(image), other.eval()(image))


class CallsOperators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu()).flatten(2).mean(0).T
        corners = torch.ops.aten.cumsum.default(y[:, :4], 1)
        kept: Tensor = torch.ops.torchvision.nms(corners, torch.ops.aten.neg(y[:, 4]), 0.7)
        return y[kept]


def test_operators_of_libraries_pickle() -> None:
    x = torch.randn(2, 3, 8, 8)
    converted = prune_and_convert(CallsOperators(), x)
    assert torch.equal(pickle.loads(pickle.dumps(converted))(x), converted(x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Reverses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(Reversed.apply(self.second(self.first(x))))
        return y


def test_functions_with_a_backward_of_their_own_pickle_and_are_given_to_load(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    converted = prune_and_convert(Reverses(), x)
    file = save(converted, tmp_path / "model.safetensors")
    others = (pickle.loads(pickle.dumps(converted)), load(file, functions=[Reversed]))
    for module in (converted, *others):
        module(x).sum().backward()
    for other in others:
        for (name, one), another in zip(converted.named_parameters(), other.parameters(), strict=True):
            assert one.grad is not None and another.grad is not None, name
            assert torch.equal(one.grad, another.grad) and one.grad.any(), name


def test_a_function_that_is_not_given_is_asked_for(tmp_path: Path) -> None:
    file = save(prune_and_convert(Reverses(), torch.randn(2, 3, 8, 8)), tmp_path / "model.safetensors")
    same_name: Any = type("Reversed", (torch.autograd.Function,), {})
    for functions in ([], [type("Other", (torch.autograd.Function,), {})]):
        with pytest.raises(CheckpointError, match=r"applies 'Reversed'.*functions="):
            load(file, functions=functions)
    wrong: Any
    for wrong in ([Reverses], [Reversed.apply], [Reversed, same_name]):
        with pytest.raises(InputError, match="autograd"):
            load(file, functions=wrong)


def test_a_loaded_model_pickles(tmp_path: Path) -> None:
    loaded = load(save(small_model(), tmp_path / "model.safetensors"))
    assert_same_module(loaded, pickle.loads(pickle.dumps(loaded)), torch.randn(2, 3, 8, 8))


@fx.wrap
def kept_whole(x: Tensor) -> Tensor:
    return x * 2


class CallsIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(kept_whole(self.first(x)))


def test_what_cannot_be_saved_is_told_of_the_prepared_model() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(CheckpointError, match="kept_whole"):
        check_savable(sliced(smcp_fx.prepare(CallsIt(), x)))
    prepared = smcp_fx.prepare(SharedModules(), x)
    before = {
        name: value.clone() for name, value in prepared.state_dict().items() if isinstance(value, Tensor)
    }
    check_savable(sliced(prepared))
    assert all(torch.equal(value, prepared.state_dict()[name]) for name, value in before.items())
    check_savable(small_model())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_what_scripting_leaves_on_modules_does_no_harm(tmp_path: Path) -> None:
    """`torch.jit.script` hangs attributes on every module it looks at."""
    x = torch.randn(2, 3, 8, 8)
    converted = copy.deepcopy(small_model())
    for part in (nn.Conv2d, nn.BatchNorm2d, nn.ReLU):
        torch.jit.script(next(module for module in converted.modules() if type(module) is part))
    assert hasattr(converted.stem, "__overloads__")
    assert_same_module(converted, load(save(converted, tmp_path / "model.safetensors")), x)
    assert_same_module(converted, pickle.loads(pickle.dumps(converted)), x)
