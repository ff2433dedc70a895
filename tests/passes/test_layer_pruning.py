"""Layer pruning: which groups may keep nothing, what is left without them, what that costs, and what solves do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from layer_pruning_models import IMAGE, Bottleneck, Mixer, body, nothing, parallel, prepared, removable
from models import (
    Net2,
    Residual,
    backward,
    between,
    chain,
    check_slicing,
    conv,
    conv_bn,
    random_masks,
    randomise,
    run,
)
from random_networks import random_network
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.backends.onnx.export import export_onnx
from smcp_fx.channels.branches import bits
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError
from smcp_fx.inspection.text import group_text

CONFIG = MethodConfig(multiple=1, batch_norm_scaling=True, layer_pruning=True)


def test_only_what_leaves_the_network_in_one_piece_may_go() -> None:
    assert removable(prepared(chain(8, 12))) == set()
    assert removable(prepared(Residual())) == {"conv1", "conv3"}
    found = removable(prepared(body(Bottleneck(), Mixer())))
    assert found == {"1.expand.0", "1.gate.down", "2.up"}
    # Off, as it is by default, nothing may, and masks that keep nothing are refused.
    off = smcp_fx.prepare(Residual(), IMAGE, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    assert removable(off) == set()
    with pytest.raises(InputError, match="keeps nothing"):
        off.set_masks(nothing(off, "conv1"))


def test_of_branches_side_by_side_the_widest_stays() -> None:
    found = prepared(parallel(4, 6, 8, 10, 3, 12))
    assert removable(found) == {f"branches.{i}.{j}.0" for i in (0, 2) for j in (0, 1)}
    with pytest.raises(InputError, match="keeps nothing"):
        found.set_masks(nothing(found, "branches.1.0.0"))


def test_each_output_keeps_the_inputs_it_depends_on() -> None:
    """The second input reaches the output through one branch only, which could otherwise go."""

    def wiring(s: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = s.stem(x)
        return s.out(x + s.from_y(y)), s.aside(x + s.inner(x))

    parts = {"stem": conv(3, 8), "from_y": nn.Sequential(conv(3, 6), conv(6, 8)), "out": conv(8, 4)}
    inner = nn.Sequential(conv(8, 6), conv(6, 8))
    found = prepared(Net2(wiring, inner=inner, aside=conv(8, 4), **parts), (IMAGE, IMAGE + 1))
    assert removable(found) == {"inner.0"}


def test_within_modules_that_are_named() -> None:
    model = body(Bottleneck(), Bottleneck())
    assert removable(prepared(model, config={"layer_pruning_in": ("2",)})) == {"2.expand.0", "2.gate.down"}
    assert removable(prepared(model, config={"layer_pruning_in": ("1.gate.down",)})) == {"1.gate.down"}
    with pytest.raises(InputError, match="no layer in 'nowhere'"):
        prepared(model, config={"layer_pruning_in": ("nowhere",)})
    with pytest.raises(InputError, match="layer_pruning=True"):
        smcp_fx.PruningConfig(layer_pruning_in=("1",))


def test_what_goes_with_a_group() -> None:
    branches = prepared(body(Bottleneck(), Bottleneck())).channels.branches
    assert branches is not None
    everything = dict.fromkeys(["0.0", "1.expand.0", "1.gate.down", "2.expand.0", "2.gate.down"], 4)
    assert branches.closed({**everything, "1.expand.0": 0}) == {
        **everything,
        "1.expand.0": 0,
        "1.gate.down": 0,
    }
    assert branches.closed({**everything, "2.gate.down": 0}) == {**everything, "2.gate.down": 0}
    assert branches.couplings(()) == [("1.expand.0", "1.gate.down"), ("2.expand.0", "2.gate.down")]
    assert list(bits(0b101001)) == [0, 3, 5]
    pair = prepared(parallel(4, 6, 8, 10)).channels.branches
    assert pair is not None  # inner and outer layer of a branch go with each other
    assert set(pair.couplings(())) == set(itertools.permutations(["branches.0.0.0", "branches.0.1.0"]))


def test_a_branch_leaves_one_constant_and_its_layers_go() -> None:
    found = prepared(Residual())
    found.set_masks(nothing(found, "conv1", "conv3") | {"stem.0": torch.arange(16) % 4 == 0})
    masked = run(found, (IMAGE.double(),))
    sliced = smcp_fx.convert(found)
    assert_close(run(sliced, (IMAGE.double(),)), masked, "slicing")
    names = {name.rpartition(".")[0] for name in sliced.state_dict()}
    assert names == {"stem.0", "stem.1", "fc", ""}
    constants = {name: tuple(p.shape) for name, p in sliced.named_parameters() if "constant" in name}
    assert constants == {"constant_bn2": (1, 4, 1, 1), "constant_bn4": (1, 4, 1, 1)}
    # The batch norm's scale is 0 without inputs, so that its shift is what remains, in training too.
    assert_close(
        sliced.get_parameter("constant_bn2").flatten(), found.get_parameter("bn2.bias")[::4], "identity"
    )
    for shape in ((5, 3, 8, 8), (1, 3, 12, 10)):  # other batches and resolutions
        other = torch.randn(shape, dtype=torch.float64)
        assert_close(run(sliced, (other,)), run(found, (other,)), "slicing")


def test_without_a_bias_nothing_is_left_to_add() -> None:
    branch = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), conv(8, 6, bias=False), conv(6, 8, bias=False))
    found = prepared(between(lambda s, h: h + s.branch(h), branch=branch))
    found.set_masks(nothing(found, "branch.2"))
    sliced = smcp_fx.convert(found)
    assert_close(run(sliced, (IMAGE.double(),)), run(found, (IMAGE.double(),)), "slicing")
    assert [n.op for n in sliced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert not [name for name in sliced.state_dict() if "constant" in name]


def test_what_changes_a_shared_tensor_in_place_stays() -> None:
    """The branch starts with an activation in place, which the way around it sees as well."""
    branch = nn.Sequential(nn.ReLU(inplace=True), conv(8, 6), conv(6, 8))

    def wiring(s: Any, h: Tensor) -> Tensor:
        inner = s.branch(h)
        return h + inner  # type: ignore[no-any-return]

    found = prepared(between(wiring, branch=branch))
    assert removable(found) == {"branch.1"}
    found.set_masks(nothing(found, "branch.1"))
    sliced = smcp_fx.convert(found)
    assert_close(run(sliced, (IMAGE.double(),)), run(found, (IMAGE.double(),)), "slicing")
    assert "branch.0" in {node.target for node in sliced.graph.nodes}


def test_where_sizes_decide_what_is_left_a_unit_stays() -> None:
    """Zero padding around a constant: a frame, in the middle of which it is another constant."""
    branch = nn.Sequential(conv(8, 6), conv(6, 4), nn.Sigmoid(), conv(4, 8))
    found = prepared(between(lambda s, h: h + s.branch(h), branch=branch))
    assert removable(found) == {"branch.0", "branch.1"}  # a solve empties both, and then the frame is none
    found.set_masks(nothing(found, "branch.0"))
    sliced = smcp_fx.convert(found)
    assert_close(run(sliced, (IMAGE.double(),)), run(found, (IMAGE.double(),)), "slicing")
    assert tuple(sliced.get_parameter("branch.0.weight").shape) == (1, 8, 3, 3)
    assert int(found.masks["branch.0"].sum()) == 0


def stages(s: Any, h: Tensor) -> Tensor:
    """A Res2Net's: both of its calls of `relu` may leave the same zeros, which one parameter holds then."""
    first, second, third = h.split(3, 1)
    one = F.relu(s.one(first))
    return torch.cat([one, F.relu(s.two(one + second)), third], 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: body(Bottleneck(), Mixer(), Bottleneck()),
        lambda: parallel(4, 6, 8, 10, 3, 12),
        lambda: between(
            lambda s, h: torch.cat([h, s.one(h), s.two(torch.cat([h, s.one(h)], 1))], 1),
            after=16,
            one=nn.Sequential(conv_bn(8, 6, 1), conv(6, 4)),
            two=nn.Sequential(conv_bn(12, 6, 1), conv(6, 4)),
        ),
        lambda: between(
            lambda s, h: h + s.branch(h),
            branch=nn.Sequential(conv(8, 6), nn.GroupNorm(2, 6), nn.ReLU(), conv(6, 8), nn.InstanceNorm2d(8)),
        ),
        lambda: between(stages, 9, one=conv(3, 3, bias=False), two=conv(3, 3, bias=False)),
    ],
    ids=["residual", "parallel", "dense", "norms", "stages"],
)
def test_masked_is_sliced_for_many_choices_of_what_keeps_nothing(build: Any) -> None:
    model = build()
    found = prepared(model)
    names = sorted(removable(found))
    assert names
    choices = list(itertools.product([False, True], repeat=len(names)))
    for zero in choices[:: -(-len(choices) // 12)] + choices[-1:]:
        chosen = [name for name, empty in zip(names, zero, strict=True) if empty]
        found.set_masks(random_masks(found, 3, nothing=0.0) | nothing(found, *chosen))
        sliced = smcp_fx.convert(found)
        assert_close(run(sliced, (IMAGE.double(),)), run(found, (IMAGE.double(),)), "slicing", str(chosen))
    backward(sliced, (IMAGE.double(),))
    assert all(p.grad is not None for p in sliced.parameters())


def test_random_networks_with_branches() -> None:
    gone = 0
    for seed in range(8):
        network = random_network(seed, branches=True)
        print(
            f"random_network({seed}, branches=True): {'; '.join(network.program)}"
        )  # shown when the test fails
        found = check_slicing(network, (torch.randn(2, 3, 8, 8),), seeds=(seed,), layer_pruning=True)
        gone += len(removable(found))
    assert gone > 12


def test_sizes_asked_of_an_activation_in_place_keep_no_branch() -> None:
    """It writes into what goes with it; what writes into a buffer stays (tests/channels/test_running.py)."""
    network = random_network(1140018, branches=True)
    check_slicing(network, (torch.randn(2, 3, 8, 8),), seeds=(1140018, 1140019), layer_pruning=True)


def test_masks_by_hand_leave_the_same_network_in_training() -> None:
    """One group alone keeps nothing; what is behind it then holds constants, which its norm must not stretch."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
            self.third, self.norm = nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.third(torch.relu(self.second(torch.relu(self.first(x))))))

    found = prepared(body(Behind()))
    found.set_masks(random_masks(found, 3, nothing=0.0) | nothing(found, "1.first"))
    sliced = smcp_fx.convert(found)
    for mode in (False, True):
        image = torch.randn(IMAGE.shape, dtype=torch.float64)
        assert_close(sliced.train(mode)(image), found.train(mode)(image), "slicing", f"training {mode}")


@pytest.mark.slow
def test_the_exported_file_computes_what_is_left(tmp_path: Path) -> None:
    model = body(Bottleneck(), Mixer(), Mixer())
    found = smcp_fx.prepare(randomise(model).eval(), IMAGE, config=CONFIG)
    found.set_masks(nothing(found, *removable(found)))
    path = export_onnx(smcp_fx.convert(found), (IMAGE,), tmp_path / "sliced.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for images in (IMAGE, torch.cat([IMAGE, -IMAGE])):
        (output,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        assert_close(torch.from_numpy(output), run(found, (images,)), "slicing")


def test_saved_loaded_told(tmp_path: Path) -> None:
    model = randomise(body(Bottleneck(), Mixer(), Bottleneck())).eval()
    found = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    found.set_masks(nothing(found, "1.expand.0", "1.gate.down", "2.up", "3.gate.down"))
    sliced = smcp_fx.convert(found)
    expected = run(sliced, (IMAGE,))
    assert_close(expected, run(found, (IMAGE,)), "slicing")
    again = smcp_fx.load(smcp_fx.save(sliced, tmp_path / "sliced.safetensors"))
    assert torch.equal(run(again.eval(), (IMAGE,)), expected)
    text = group_text(found.channels, "1.expand.0").plain
    assert "may keep 0, 1, 2" in text
    state = found.state_dict()
    other = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    other.load_state_dict(state)
    assert {n: int(m.sum()) for n, m in other.masks.items()} == {
        n: int(m.sum()) for n, m in found.masks.items()
    }
    assert_close(run(other, (IMAGE,)), run(found, (IMAGE,)), "identity")


class Attending(nn.Module):
    """A branch of attention, whose weights, averaged over the heads, nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.back = nn.Linear(8, 6), nn.Linear(6, 8)
        self.attend = nn.MultiheadAttention(6, 2, kdim=8, vdim=8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        asked = self.ask(tokens)
        found = asked + self.attend(asked, tokens, tokens)[0]
        return x + self.back(found).transpose(1, 2).reshape(x.shape)


class NormedTogether(nn.Module):
    """Two branches side by side, and one norm over both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.norm, self.last = nn.GroupNorm(1, 10), nn.Conv2d(10, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.norm(torch.cat([self.a(x), self.b(x)], 1)))


def test_what_a_branch_that_goes_computes_for_nobody_goes_with_it() -> None:
    found = prepared(body(Attending()))
    (name,) = removable(found) & {"1.ask"}
    found.set_masks(nothing(found, name))
    sliced = smcp_fx.convert(found)
    assert_close(run(sliced, (IMAGE.double(),)), run(found, (IMAGE.double(),)), "slicing")
    assert [path for path, _ in sliced.named_parameters() if path.startswith("1.")] == ["1.constant_reshape"]


def test_groups_that_one_norm_reads_together_keep_a_unit_each() -> None:
    """One that had to come back, for want of a constant to leave, would count in the norm's statistics."""
    assert not removable(prepared(body(NormedTogether()))) & {"1.a", "1.b"}
