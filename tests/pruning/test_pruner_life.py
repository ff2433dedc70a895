"""A prepared model's life in any order: masked equals sliced, a restored copy goes on alike, errors are ours.

hypothesis draws the order. ``SMCP_LIFE_EXAMPLES=2000`` draws more of them, at random; by default they are the same
few in every run.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from models import Net, Residual, conv_bn, randomise, run
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import SmcpError
from smcp_fx.passes.insert_soft_masks import mask_name, masked_layers
from smcp_fx.pruning.loop_watch import TrainingWarning

EXAMPLES = int(os.environ.get("SMCP_LIFE_EXAMPLES", "0"))
IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=6, warmup=0.2, ramp=0.4, cooldown=0.2, every=1)


def concat() -> nn.Module:
    """Two branches side by side and one around them."""
    return Net(
        lambda s, x: s.last(torch.cat([s.a(h := s.stem(x)), s.b(h)], 1) + s.around(h)).mean((2, 3)),
        stem=conv_bn(3, 8), a=conv_bn(8, 6), b=conv_bn(8, 10), around=conv_bn(8, 16), last=conv_bn(16, 5),
    )  # fmt: skip


def depthwise() -> nn.Module:
    """An inverted bottleneck."""
    return Net(
        lambda s, x: s.last((h := s.stem(x)) + s.project(s.deep(s.expand(h)))).mean((2, 3)),
        stem=conv_bn(3, 8), expand=conv_bn(8, 16, 1), deep=conv_bn(16, 16, groups=16), project=conv_bn(16, 8, 1),
        last=conv_bn(8, 5),
    )  # fmt: skip


#: Model, schedule, and options that differ from the defaults.
LIVES: tuple[tuple[Any, smcp_fx.Schedule | None, dict[str, Any]], ...] = (
    (lambda: Residual(8, 12), SCHEDULE, {"multiple": 4, "batch_norm_scaling": True}),
    (concat, SCHEDULE, {"multiple": 2, "layer_pruning": True}),
    (depthwise, None, {"multiple": 4, "layer_pruning": True, "tolerance": 0.3}),
    (concat, SCHEDULE, {"multiple": 4, "mask": "permanent", "memory": 0.0}),
    (lambda: Residual(8, 12), None, {"multiple": 3, "allocation": "paper", "mask": "permanent"}),
)
seeds = st.integers(0, 2**16)


class Life(RuleBasedStateMachine):
    """One prepared model, its optimiser, and the folder of its checkpoints."""

    @initialize(life=st.sampled_from(LIVES))
    def prepare(self, life: tuple[Any, smcp_fx.Schedule | None, dict[str, Any]]) -> None:
        self.life = life
        self.folder = tempfile.TemporaryDirectory()
        self.checkpoint: Path | None = None
        self.live_with(self.fresh())

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def fresh(self) -> smcp_fx.PreparedModel:
        """Prepared as the model was."""
        build, schedule, options = self.life
        torch.manual_seed(0)
        config = MethodConfig(**options)
        return smcp_fx.prepare(
            randomise(build()).train(), IMAGE, target=0.5, schedule=schedule, config=config
        )

    def live_with(self, prepared: smcp_fx.PreparedModel) -> None:
        self.prepared = prepared
        self.optimizer = optimizer_of(prepared)

    @rule(
        seed=seeds,
        loss=st.sampled_from(["finite", "finite", "finite", "nan"]),
        batches=st.integers(1, 2),
        call=st.booleans(),
        to_none=st.booleans(),
    )
    def train_a_step(self, seed: int, loss: str, batches: int, call: bool, to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)
        for batch in range(batches):
            backward(self.prepared, seed + batch, loss == "nan")
        if call:
            attempt(self.prepared.pruner.step)
        if loss == "finite":
            self.optimizer.step()

    @rule()
    def step_again(self) -> None:
        attempt(self.prepared.pruner.step)

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        self.prepared.zero_grad(set_to_none=to_none)

    @rule(wanted=st.sampled_from([None, 0.3, 0.5, 0.9, 1.0, 1e-6, "1 KFLOPs"]))
    def solve(self, wanted: float | str | None) -> None:
        if attempt(lambda: self.prepared.pruner.solve(wanted)) is not None:
            permitted = self.prepared.pruner.cost.permitted
            permanent = self.life[2].get("mask") == "permanent"  # cannot grow to a permitted count
            assert permanent or all(c in permitted[n] for n, c in self.prepared.pruner.counts.items())

    @rule(seed=seeds, some=st.booleans())
    def set_masks(self, seed: int, some: bool) -> None:
        """Any that keep a unit, or none where that is allowed: their counts need not be permitted."""
        generator = torch.Generator().manual_seed(seed)
        masks = {}
        for group in self.prepared.channels.groups:
            if group.free and not (some and float(torch.rand((), generator=generator)) < 0.5):
                count = int(
                    torch.randint(0 if 0 in group.permitted else 1, group.size + 1, (1,), generator=generator)
                )
                order = torch.randperm(group.size, generator=generator)
                masks[group.name] = torch.zeros(group.size, dtype=torch.bool).index_fill(
                    0, order[:count], True
                )
        self.prepared.set_masks(masks)
        for name, mask in masks.items():
            assert torch.equal(self.prepared.masks[name], mask)

    @rule(seed=seeds, frozen=st.booleans())
    def freeze(self, seed: int, frozen: bool) -> None:
        """Some parameters, or all of them."""
        generator = torch.Generator().manual_seed(seed)
        share = float(torch.randint(1, 4, (1,), generator=generator)) / 3
        for parameter in self.prepared.parameters():
            if float(torch.rand((), generator=generator)) < share:
                parameter.requires_grad_(not frozen)

    @rule(dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    def to(self, dtype: torch.dtype) -> None:
        before = {
            name: getattr(self.prepared.smcp, name).clone() for name in ("gathered", "remembered", "keep")
        }
        self.live_with(self.prepared.to(dtype))
        for name, value in before.items():
            assert torch.equal(getattr(self.prepared.smcp, name), value), name

    @rule(training=st.booleans())
    def mode(self, training: bool) -> None:
        self.prepared.train(training)

    @rule(seed=seeds, way=st.sampled_from(["copy", "state", "checkpoint"]), stay=st.booleans())
    def resume(self, seed: int, way: str, stay: bool) -> None:
        """A copy holds the same state, and goes on to the same masks."""
        if way == "copy":
            other = copy.deepcopy(self.prepared)
        else:
            other = self.fresh().to(next(self.prepared.parameters()).dtype).train(self.prepared.training)
            for mine, its in zip(self.prepared.parameters(), other.parameters(), strict=True):
                its.requires_grad_(mine.requires_grad)
        if way == "state":
            other.load_state_dict(copy.deepcopy(self.prepared.state_dict()))
        if way == "checkpoint":
            self.checkpoint = Path(self.folder.name) / "checkpoint.safetensors"
            smcp_fx.save_checkpoint(self.checkpoint, self.prepared, self.optimizer)
            smcp_fx.load_checkpoint(self.checkpoint, other, optimizer_of(other))
        same_state(other, self.prepared)
        mine = copy.deepcopy(self.prepared)
        for model in (mine, other):
            model.zero_grad()
        # Masks of weights that were frozen after `prepare` take gradients from the next step on: those of both, here.
        for left, right in zip(mine.smcp.buffers(), other.smcp.buffers(), strict=True):
            left.grad = right.grad = None
            right.requires_grad_(left.requires_grad)
        for _ in range(3):
            solves = []
            for model in (mine, other):
                model.zero_grad()
                backward(model, seed, nan=False)
                solves.append((attempt(model.pruner.step), attempt(model.pruner.solve)))
            same_state(other, mine)
            for left, right in zip(*solves, strict=True):
                assert (left is None) == (right is None)
                assert left is None or left.masks == right.masks
        if stay:
            self.live_with(other)

    @rule()
    def go_back(self) -> None:
        """To the last checkpoint, whatever the model was since."""
        if self.checkpoint is not None:
            dtype = next(self.prepared.parameters()).dtype
            smcp_fx.load_checkpoint(self.checkpoint, self.prepared, optimizer_of(self.prepared))
            assert next(self.prepared.parameters()).dtype == dtype

    @rule(seed=seeds)
    def convert(self, seed: int) -> None:
        """Sliced computes what masked does: nearly in the half precision it has, and exactly in float32."""
        image = torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        before = {name: value.clone() for name, value in self.prepared.state_dict().items()}
        own = smcp_fx.convert(self.prepared)
        assert all(
            torch.equal(before[n], v) for n, v in self.prepared.state_dict().items() if not v.isnan().any()
        )
        dtype = next(self.prepared.parameters()).dtype
        assert all(value.dtype == dtype for value in own.parameters())
        given = run(own.eval(), (image.to(dtype),))
        expected = run(copy.deepcopy(self.prepared).eval(), (image.to(dtype),))
        assert given.shape == (3, 5)
        if dtype in (torch.float16, torch.bfloat16) and bool(torch.isfinite(expected).all()):
            assert_close(given, expected, "identity")
        masked, sliced = copy.deepcopy(self.prepared).eval(), own
        if dtype not in (torch.float32, torch.float64):
            masked.float()
            sliced = smcp_fx.convert(masked).eval()  # where scaled weights are folded, they are rounded
        image = image.to(next(masked.parameters()).dtype)
        expected = run(masked, (image,))
        if bool(torch.isfinite(expected).all()):
            assert_close(run(sliced, (image,)), expected, "slicing", "sliced")

    @invariant()
    def masks_follow(self) -> None:
        """What the graph multiplies by is what ``masks`` says, in the weights' type."""
        if not hasattr(self, "prepared"):
            return
        state = self.prepared.smcp
        kept = torch.cat([state.keep, torch.ones(1, dtype=torch.bool)])
        for layer in masked_layers(self.prepared.channels):
            mask = getattr(state, mask_name(layer)).detach()
            expected = kept[state.layer_places(layer)]
            assert torch.equal(mask.amax([d for d in range(mask.dim()) if d != layer.in_dim]) > 0, expected)
        assert state.gathered.dtype == state.remembered.dtype == torch.float32
        assert bool(torch.isfinite(state.gathered).all() and torch.isfinite(state.remembered).all())


def test_scales_come_back_from_half_precision() -> None:
    """They follow from the masks: those of a model that was in bfloat16 are not rounded."""
    prepared = smcp_fx.prepare(Residual(8, 12), IMAGE, config=MethodConfig(batch_norm_scaling=True))
    prepared.set_masks(
        {group.name: torch.arange(group.size) < 5 for group in prepared.channels.groups if group.free}
    )
    before = prepared.smcp.scales
    prepared.to(torch.bfloat16).float()
    assert all(torch.equal(scale, before[name]) for name, scale in prepared.smcp.scales.items())
    assert min(float(scale.min()) for scale in before.values()) < 1


def optimizer_of(prepared: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(prepared.parameters(), lr=0.01, momentum=0.9)


def backward(prepared: smcp_fx.PreparedModel, seed: int, nan: bool) -> None:
    """Gradients of a loss on noise; none where everything is frozen."""
    dtype = next(prepared.parameters()).dtype
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    loss = (prepared(x).float() ** 2).mean() * (float("nan") if nan else 1.0)
    if loss.requires_grad:
        loss.backward()


def attempt(action: Any) -> Any:
    """Its result, or None where it raises one of the library's errors."""
    try:
        return action()
    except SmcpError:
        return None


def same_state(found: smcp_fx.PreparedModel, expected: smcp_fx.PreparedModel) -> None:
    mine: dict[str, Tensor] = found.smcp.state_dict()
    for name, value in expected.smcp.state_dict().items():
        assert torch.equal(mine[name], value), name


@pytest.mark.filterwarnings("ignore::smcp_fx.pruning.loop_watch.TrainingWarning")
def test_any_order() -> None:
    more = EXAMPLES > 0
    profile = settings(
        max_examples=EXAMPLES or 20,
        stateful_step_count=30 if more else 12,
        derandomize=not more,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        run_state_machine_as_test(Life, settings=profile)
