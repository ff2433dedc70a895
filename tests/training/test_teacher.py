"""The teacher against PyTorch's own formulas, in every kind of loop, and what it refuses."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_training import batch, network, prepared_model
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError
from smcp_fx.training import TrainingLoop


def by_hand(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Sum p log(p / q) over classes, mean over the rest, times T squared."""
    p, q = ((scores / temperature).softmax(1) for scores in (teacher, student))
    return (p * (p / q).log()).sum(1).mean() * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 4)])
def test_it_is_the_divergence(temperature: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    teacher = smcp_fx.Teacher(nn.Identity(), temperature, "classes")
    ours, theirs = torch.randn(shape).double(), torch.randn(shape).double().requires_grad_()
    found = teacher(ours, theirs)
    expected = by_hand(theirs, ours, temperature)
    assert_close(found.float(), expected.float(), "identity")
    (slope,) = torch.autograd.grad(found, theirs)
    (expected_slope,) = torch.autograd.grad(expected, theirs)
    assert_close(slope.float(), expected_slope.float(), "importance")
    assert teacher(ours, ours).item() == pytest.approx(0, abs=1e-6)


def test_the_model_is_a_copy_in_eval_mode_and_has_no_gradients() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    teacher = smcp_fx.Teacher(model, outputs="classes")
    x, _ = batch(0)
    answers = model.eval()(x).detach()
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    outputs = torch.randn(8, 5, requires_grad=True)
    teacher(x, outputs).backward()
    assert outputs.grad is not None
    assert_close(teacher(x, outputs).detach(), by_hand(outputs, answers, 1.0).detach(), "identity")
    held = teacher.model
    assert not held.training and not any(p.requires_grad or p.grad is not None for p in held.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.state_dict().items())
    assert model.training and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "outputs",
    [
        lambda y: (y, y.sum()),
        lambda y: {"loss": y.sum(), "logits": y, "hidden": y[:, :2]},
        lambda y: SimpleNamespace(logits=y, hidden=y[:, :2]),
        lambda y: namedtuple("Answer", "logits aux")(y, y[:, :2]),
        lambda y: {"out": y},
    ],
)
def test_scores_are_found_in_outputs_of_usual_forms(outputs: Callable[[Tensor], Any]) -> None:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return outputs(x)

    ours, theirs = torch.randn(4, 3), torch.randn(4, 3)
    found = smcp_fx.Teacher(Wrapped(), outputs="classes")(ours, outputs(theirs))
    assert found == smcp_fx.Teacher(nn.Identity(), outputs="classes")(ours, theirs)


def test_inputs_are_those_of_the_model() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return a + b, a - b

    a, b, theirs = torch.randn(3, 3, 4)
    teacher = smcp_fx.Teacher(Two(), outputs={"0": "classes"})
    expected = smcp_fx.Teacher(nn.Identity(), outputs="classes")(a + b, theirs)
    assert teacher((a, b), theirs) == teacher({"b": b, "a": a}, theirs) == expected


def test_mixed_precision_computes_the_divergence_in_float32() -> None:
    x, labels = batch(1)
    model, teacher = network(), smcp_fx.Teacher(network(), outputs="classes")
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(x)
        loss = 0.1 * F.cross_entropy(outputs, labels) + 0.9 * teacher(x, outputs)
    assert outputs.dtype == torch.bfloat16 and loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_prepared_model_learns_from_it_as_from_a_loss_by_hand() -> None:
    """Masks, importances and weights after a whole schedule are those of the same loss written out."""
    ended = []
    dense = network().eval()
    for own in (True, False):
        prepared, teacher = prepared_model(network()), smcp_fx.Teacher(dense, outputs="classes")
        optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
        for step in range(12):
            x, labels = batch(step)
            outputs = prepared(x)
            with torch.no_grad():
                answers = dense(x)
            told = teacher(x, outputs) if own else by_hand(outputs, answers, 1.0)
            optimizer.zero_grad()
            (0.1 * F.cross_entropy(outputs, labels) + 0.9 * told).backward()
            prepared.pruner.step()
            optimizer.step()
        ended.append(prepared)
    assert all(torch.equal(mask, ended[1].masks[name]) for name, mask in ended[0].masks.items())
    assert_close(dict(ended[0].named_parameters()), dict(ended[1].named_parameters()), "accumulation")


def test_the_loop_of_the_commands_learns_from_it(tmp_path: Path) -> None:
    dense = network().eval()
    x, labels = batch(0)

    def trained(**options: Any) -> nn.Module:
        model = network()
        TrainingLoop(
            model, torch.optim.SGD(model.parameters(), lr=1.0), batches=lambda *_: [(x, labels)],
            loss=F.cross_entropy, rate=lambda _: 0.1, evaluate=lambda _: {}, steps_per_epoch=1, total_steps=1,
            checkpoint=tmp_path / "c.safetensors", seed=0, **options,
        ).run()  # fmt: skip
        return model

    for share in (0.25, 1.0):
        expected = network()
        outputs = expected(x)
        told = by_hand(outputs, dense(x).detach(), 1.0)
        ((1 - share) * F.cross_entropy(outputs, labels) + share * told).backward()
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        found = trained(teacher=smcp_fx.Teacher(dense, outputs="classes"), taught=share)
        assert_close(dict(found.named_parameters()), dict(expected.named_parameters()), "accumulation")


def test_it_teaches_under_distributed_data_parallel(tmp_path: Path) -> None:
    """Wrapped models have no part of the teacher; a wrapped teacher is looked into."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/d", rank=0, world_size=1)
    try:
        x, _ = batch(0)
        wrapped = nn.parallel.DistributedDataParallel(network())
        teacher = smcp_fx.Teacher(wrapped, outputs="classes")
        wrapped.module.teacher = teacher  # no submodule
        teacher(x, wrapped(x)).backward()
        assert isinstance(teacher.model, type(network()))
        assert {name for name, _ in wrapped.module.named_parameters()} == {
            n for n, _ in network().named_parameters()
        }
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_no_teacher_is_refused() -> None:
    identity = smcp_fx.Teacher(nn.Identity(), outputs="classes")
    for make, said in (
        (lambda: smcp_fx.Teacher("resnet"), "needs an nn.Module, not str"),  # type: ignore[arg-type]
        (lambda: smcp_fx.Teacher(prepared_model()), "before prepare"),
        (lambda: smcp_fx.Teacher(network(), temperature=0), "temperature must be a positive number"),
        (lambda: identity(torch.zeros(2, 3), torch.zeros(2, 4)), r"\[2, 3\].*\[2, 4\]"),
        (lambda: smcp_fx.Teacher(nn.Identity(), 1.0, "classes")(*torch.zeros(2, 2)), "along dimension 0"),
        (lambda: identity(torch.zeros(2, 3), None), "must be the same"),
        (
            lambda: smcp_fx.Teacher(network())(torch.zeros(2, 3), None),
            r"does not take.*teacher\(inputs, outputs\)",
        ),
        (lambda: identity.watch("resnet"), "watch needs an nn.Module, not str"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=said):
            make()


def told_of(teacher: smcp_fx.Teacher, x: Any, outputs: Any, said: str) -> Tensor:
    """Its loss; the warning says what the outputs are taken for, once."""
    with pytest.warns(UserWarning, match=said):
        found = teacher(x, outputs)
    assert torch.equal(teacher(x, outputs), found)
    return found


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 8), (3, 2, 4, 5)])
def test_values_are_compared_by_their_squared_error(shape: tuple[int, ...]) -> None:
    ours, theirs = torch.randn(2, *shape) * 3 + 5
    found = told_of(smcp_fx.Teacher(nn.Identity()), ours, theirs, "values")
    expected = (ours - theirs).square().mean() / (ours - ours.mean(0)).square().mean()
    assert_close(found, expected, "identity")


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_yes_or_no_is_compared_by_the_divergence_of_two_classes(temperature: float) -> None:
    ours, theirs = torch.randn(2, 5, 1, 4, 4)
    teacher = smcp_fx.Teacher(nn.Identity(), temperature, "binary")
    expected = by_hand(*(torch.cat([t, 0 * t], 1) for t in (theirs, ours)), temperature)
    assert_close(teacher(ours, theirs), expected, "identity")
    if temperature == 1:
        both = ours.sigmoid(), theirs.sigmoid()
        found = smcp_fx.Teacher(nn.Identity(), 1.0, "binary")(*both)
        assert_close(found, expected, "importance")


def test_probabilities_are_compared_as_such() -> None:
    ours, theirs = torch.randn(2, 3, 7, 5)
    teacher = smcp_fx.Teacher(nn.Identity())
    found = told_of(teacher, ours.softmax(2), theirs.softmax(2), "probabilities of classes along dimension 2")
    assert_close(found, by_hand(theirs.mT, ours.mT, 1.0), "identity")


def test_outputs_that_a_call_leaves_out_do_not_count() -> None:
    class Levels(nn.Module):
        def forward(self, x: Tensor, names: str) -> Any:
            return dict.fromkeys(names, x)

    x, y = torch.randn(2, 4, 3)
    teacher = smcp_fx.Teacher(Levels(), outputs="values")
    both = teacher((x, "ab"), {"a": y, "b": y})
    assert_close(teacher((x, "b"), {"b": y}), both / 2, "identity")
    with pytest.raises(InputError, match=r"the teacher's output holds none of \['a', 'b'\]"):
        teacher((x, "c"), {"c": y})


def test_the_parts_of_nested_outputs_add_up() -> None:
    class Detector(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"levels": [{"cls": x, "box": x[:, :4]}], "hidden": x, "step": 3}

    ours, theirs = torch.randn(2, 8, 6)
    found = told_of(
        smcp_fx.Teacher(Detector()), ours, Detector()(theirs), "'levels.0.cls'.*left out: 'hidden'"
    )
    parts = smcp_fx.Teacher(nn.Identity(), 1.0, "classes"), smcp_fx.Teacher(nn.Identity(), 1.0, "values")
    assert_close(found, parts[0](ours, theirs) + parts[1](ours[:, :4], theirs[:, :4]), "identity")
