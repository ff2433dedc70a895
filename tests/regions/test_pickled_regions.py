"""`torch.save`, pickle and copies of models that were traced in regions."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import random_masks, randomise
from test_regions import IMAGES, Pyramid, Split, conv, outputs
from tolerances import assert_close
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import smcp_fx
from smcp_fx.errors import CheckpointError

SCRIPT = """
import sys, torch
import smcp_fx
sys.path += sys.argv[3:]
models, values = torch.load(sys.argv[1], weights_only=False), torch.load(sys.argv[2])
torch.set_num_threads(1)
from tolerances import assert_close
for model, (inputs, expected) in zip(models, values, strict=True):
    assert_close([model.eval()(*inputs), model.train()(*inputs)], expected, "identity")
"""


class Shares(Split):
    """One module at two places of a region, and a buffer outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        same = conv(12, 12)
        self.body = nn.Sequential(same, same, conv(12, 20))
        self.register_buffer("factor", torch.full((1,), 2.0).double(), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.factor


class Drops(Split):
    """A region that does something else in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.append(nn.Dropout(0.5))


NETWORKS: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
    "tensors": (Split, (IMAGES,)),
    "dicts, lists and strings": (Pyramid, ([IMAGES[0], IMAGES[1]],)),
    "shared": (Shares, (IMAGES,)),
    "modes": (Drops, (IMAGES,)),
}


@cache
def converted(name: str) -> nn.Module:
    """One of these, pruned; the same object every time."""
    return pruned(*NETWORKS[name])


def pruned(kind: type[nn.Module], inputs: tuple[Any, ...]) -> nn.Module:
    torch.manual_seed(0)
    prepared = smcp_fx.prepare(
        randomise(kind()).double(), inputs, config=smcp_fx.PruningConfig(multiple=1), target=1.0
    )
    assert prepared.regions
    prepared.set_masks(random_masks(prepared, 0))
    return smcp_fx.convert(prepared)


def in_both_modes(model: nn.Module, inputs: tuple[Any, ...]) -> list[Any]:
    """Outputs in eval and in train mode, of a copy: batch norms move."""
    found = []
    for training in (False, True):
        torch.manual_seed(1)
        found.append(outputs(copy.deepcopy(model).train(training), inputs))
    return found


def through_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "torch.save": through_torch,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_it_comes_back_the_same(name: str, way: str) -> None:
    kind, inputs = NETWORKS[name]
    model = converted(name)
    again = WAYS[way](model)
    assert type(again) is kind
    assert list(again.state_dict()) == list(model.state_dict())
    assert_close(in_both_modes(again, inputs), in_both_modes(model, inputs), "identity", way)
    # It is one model: what is moved, frozen and trained is what its regions read.
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    assert not any(leaf.any() for leaf in pytree.tree_leaves(in_both_modes(again, inputs)))
    assert all(leaf.any() for leaf in pytree.tree_leaves(in_both_modes(model, inputs)))


def test_shared_modules_stay_one() -> None:
    model = through_torch(converted("shared"))
    assert model.body[0] is model.body[1]
    assert model.body[0][0].weight is model.body[1][0].weight


def test_a_part_that_is_taken_out_pickles() -> None:
    model = converted("tensors")
    stem = through_torch(model.stem)
    assert_close(outputs(stem, (IMAGES,)), outputs(model.stem, (IMAGES,)), "identity")


def test_a_new_process_loads_them(tmp_path: Path) -> None:
    models = {name: converted(name) for name in ("tensors", "dicts, lists and strings")}
    torch.save(list(models.values()), tmp_path / "model.pt")
    values = [(NETWORKS[name][1], in_both_modes(model, NETWORKS[name][1])) for name, model in models.items()]
    torch.save(values, tmp_path / "values.pt")
    here = Path(__file__).parent
    arguments = [str(path) for path in (tmp_path / "model.pt", tmp_path / "values.pt", here, here.parent)]
    run = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def reversed_function() -> type[torch.autograd.Function]:
    class Reverse(torch.autograd.Function):
        """Known to nobody else by name."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return -gradient

    return Reverse


LOCAL = reversed_function()


class Turns(nn.Module):
    """Calls a function of autograd that no module holds by its name."""

    def forward(self, x: Tensor) -> Tensor:
        return LOCAL.apply(x)  # type: ignore[no-any-return]


class CallsIt(Split):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(12, 16), Turns(), conv(16, 20))


class CallsItWhole(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(conv(3, 8), conv(8, 8), Turns(), nn.Conv2d(8, 4, 1))


@pytest.mark.parametrize(("kind", "words"), [(CallsIt, "region 'body', node "), (CallsItWhole, "node ")])
def test_what_does_not_pickle_is_told(kind: type[nn.Module], words: str, tmp_path: Path) -> None:
    prepared = smcp_fx.prepare(randomise(kind()).double(), IMAGES, target=1.0)
    model = smcp_fx.convert(prepared)
    with pytest.raises(CheckpointError, match=rf"{words}.*does not pickle .*at the top of a module"):
        pickle.dumps(model)
    with pytest.raises(CheckpointError, match="does not pickle"):
        torch.save(model, tmp_path / "model.pt")
    copy.deepcopy(model)
