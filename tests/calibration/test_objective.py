"""What is differentiated without a loss: its squared gradients against exact Fisher and Gauss-Newton matrices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import chain, randomise
from torch import Tensor, nn

import smcp_fx
from smcp_fx.calibration.batches import Batch, each_batch
from smcp_fx.calibration.objective import Objective, cancelled
from smcp_fx.errors import InputError

#: Draws whose mean is taken, and how far it may be from the truth, a share of the largest entry.
_DRAWS, _NEAR = 600, 0.2


def _first(x: Any) -> Batch:
    return next(each_batch(x))


def _curvature(objective: Objective, outputs: Callable[[Tensor], Any], at: Tensor, batch: Batch) -> Tensor:
    """The mean of g g' of one image's gradient by ``at``, over draws."""
    at = at.clone().requires_grad_()
    total = torch.zeros(at.numel(), at.numel())
    for _ in range(_DRAWS):
        (gradient,) = torch.autograd.grad(objective(outputs(at), batch), at)
        total += torch.outer(gradient.flatten(), gradient.flatten()) / _DRAWS
    return total


def _near(found: Tensor, expected: Tensor) -> bool:
    return bool(((found - expected).abs() <= _NEAR * expected.abs().max()).all())


def _hessian(distance: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    found: Tensor = torch.autograd.functional.hessian(distance, at)  # type: ignore[no-untyped-call]
    return found.reshape(at.numel(), at.numel())


KINDS: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "[b, c]": ("classes", (1, 4), lambda z: z.log_softmax(1)),
    "[b, c, h, w]": ("classes", (1, 3, 1, 2), lambda z: z.log_softmax(1)),
    "[b, t, c]": ("classes", (1, 2, 3), lambda z: z.log_softmax(2)),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("probabilities", [False, True])
def test_classes_give_the_curvature_of_the_mean_divergence(name: str, probabilities: bool) -> None:
    torch.manual_seed(0)
    kind, shape, logs = KINDS[name]
    scores, batch = torch.randn(shape), _first(torch.randn(1, 3))
    objective = Objective(nn.Identity(), outputs=kind)
    found = _curvature(objective, lambda z: logs(z).exp() if probabilities else z, scores, batch)
    positions = scores.numel() / scores.shape[2 if scores.dim() == 3 else 1]
    before = logs(scores)
    expected = _hessian(lambda z: (before.exp() * (before - logs(z))).sum() / positions, scores)
    assert _near(found, expected)


def test_of_two_classes_every_draw_has_the_whole_curvature() -> None:
    torch.manual_seed(0)
    objective, batch = Objective(nn.Identity(), outputs="classes"), _first(torch.randn(1, 3))
    for score in (0.0, 1.0, 7.0):
        at = torch.tensor([[score, 0.0]], dtype=torch.float64).requires_grad_()
        p = at.detach().softmax(1)[0]
        for _ in range(4):
            (gradient,) = torch.autograd.grad(objective(at, batch), at)
            torch.testing.assert_close(torch.outer(gradient[0], gradient[0]), p.diag() - torch.outer(p, p))


def test_yes_or_no_gives_the_curvature_of_its_divergence_for_every_answer() -> None:
    """By enumeration of all answers to three questions."""
    torch.manual_seed(0)
    scores, batch = torch.randn(1, 3), _first(torch.randn(1, 3))
    found = _curvature(Objective(nn.Identity(), outputs="binary"), lambda z: z, scores, batch)
    expected = torch.zeros(3, 3)
    for answer in itertools.product((0.0, 1.0), repeat=3):
        truth, p = torch.tensor(answer), scores[0].sigmoid()
        gradient = (p - truth) / 3**0.5
        likely = torch.where(truth > 0, p, 1 - p).prod()
        expected += likely * torch.outer(gradient, gradient)
    assert _near(found, expected)


def test_values_give_the_gauss_newton_matrix_of_the_relative_squared_error() -> None:
    """Two outputs in different units, of a small network's weights: each counts its error by its own variance."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3), torch.randn(4, 3)
    scale = torch.tensor([1.0, 1.0, 100.0, 100.0])

    def outputs(w: Tensor) -> Any:
        y = (x @ w.T).tanh() * scale
        return {"a": y[:, :2], "b": [y[:, 2:] + 50]}

    def distance(w: Tensor) -> Tensor:
        parts = ((outputs(w)["a"], outputs(weight)["a"]), (outputs(w)["b"][0], outputs(weight)["b"][0]))
        errors = [(one - two).square().mean() / two.var(0, correction=0).mean() for one, two in parts]
        return torch.stack(errors).sum()

    objective = Objective(nn.Identity(), outputs="values")
    found = _curvature(objective, outputs, weight, _first(x))
    # The loss is the mean over five images of independent signs: a fifth of one image's curvature.
    assert _near(5 * found, _hessian(distance, weight))


def test_given_labels_are_used_as_what_they_are() -> None:
    torch.manual_seed(0)
    scores, batch = torch.randn(4, 5, requires_grad=True), torch.randn(4, 3)
    numbers, soft = torch.tensor([0, 4, -100, 2]), torch.randn(4, 5).softmax(1)
    several = (torch.randn(4, 5) > 0).float()
    objective = Objective(nn.Identity())
    assert torch.equal(objective(scores, _first([(batch, numbers)])), F.cross_entropy(scores, numbers))
    found = Objective(nn.Identity())(scores, _first([(batch, soft)]))
    torch.testing.assert_close(found, F.cross_entropy(scores, soft))
    with pytest.warns(UserWarning, match=r"logits of yes or no \(labels are 0 and 1\)"):
        found = Objective(nn.Identity())(scores, _first([(batch, several)]))
    torch.testing.assert_close(found, F.binary_cross_entropy_with_logits(scores, several) * 5**0.5)
    with pytest.warns(UserWarning, match="are not used"):
        Objective(nn.Identity())(scores, _first([(batch, torch.randn(4, 5))]))
    both = {"cls": scores, "box": scores * 2}
    with pytest.warns(UserWarning, match="'cls'.*'box'"):
        Objective(nn.Identity())(both, _first([(batch, {"cls": numbers, "box": torch.randn(4, 5)})]))


MISFITS: dict[str, tuple[str, Tensor, str]] = {
    "coordinates": ("classes", torch.randn(4, 5), "do not sum to one.*outputs="),
    "several labels": ("classes", torch.tensor([[1, 1, 0, 0, 0]] * 4), "do not sum to one.*outputs="),
    "numbers as floats": ("classes", torch.ones(4), "float32.*do not fit"),
    "numbers too many": ("classes", torch.ones(5).long(), "do not fit"),
    "transposed": ("binary", torch.ones(5, 4), "do not fit"),
    "nothing that counts": ("classes", torch.full((4,), -100), "leave it away"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_labels_that_do_not_fit_a_named_output_are_refused(name: str) -> None:
    kind, labels, said = MISFITS[name]
    objective = Objective(nn.Identity(), outputs=kind)
    with pytest.raises(InputError, match=f"(?s){said}"):
        objective(torch.randn(4, 5, requires_grad=True), _first([(torch.randn(4, 3), labels)]))


def test_one_number_an_image_must_be_named() -> None:
    batch, numbers = _first(torch.randn(4, 3)), torch.randn(4, 1, requires_grad=True)
    with pytest.raises(InputError, match=r"a value, or the score of yes or no.*outputs='values'.*loss="):
        Objective(nn.Identity())(numbers, batch)
    for kind in ("values", "binary"):
        assert Objective(nn.Identity(), outputs=kind)(numbers, batch).requires_grad


def test_the_reading_is_told_once() -> None:
    torch.manual_seed(0)
    model, x = randomise(chain(8, 12)).eval(), torch.randn(24, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"output \[12, 5\]: values") as told:
        smcp_fx.compress(model, [x[:12], x[12:]], config=smcp_fx.PruningConfig(multiple=1))
    assert len(told) == 1 and told[0].filename == __file__


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared error": F.mse_loss,
    "a scaled one": lambda o, y: 1e-6 * F.mse_loss(o, y),
    "a divergence": lambda o, y: F.kl_div(o.log_softmax(1), y.log_softmax(1), log_target=True),
    "of probabilities": lambda o, y: F.kl_div(o.softmax(1).log(), y.softmax(1)),
    "cross entropy": lambda o, y: F.cross_entropy(o, y.softmax(1)),
    "an angle": lambda o, y: 1 - F.cosine_similarity(o, y).mean(),
    "a smooth distance": F.smooth_l1_loss,
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore:reduction")
def test_a_loss_at_its_minimum_is_refused_with_the_cure(name: str) -> None:
    torch.manual_seed(0)
    model, x = randomise(chain(8, 12)).eval(), torch.randn(12, 3, 8, 8)
    with torch.no_grad():
        own = torch.cat([model(part) for part in (x[:5], x[5:])])
    value = OWN[name](outputs := model(x), own + 0.1 * torch.randn_like(own))
    assert cancelled(value, outputs) > 1e-3
    with pytest.raises(InputError, match=r"own outputs\. Leave the labels and loss= away"):
        smcp_fx.compress(model, [(x, own)], loss=OWN[name])


def test_a_first_batch_without_any_gradient_does_not_end_the_check() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(6, 5, requires_grad=True)
    kept, own = outputs.detach() - 3, outputs.detach()
    objective = Objective(nn.Identity(), lambda o, y: F.relu(y - o).sum() + F.mse_loss(o, y) * (y == o).all())
    assert not objective(outputs, _first([(own, kept)])).detach().any()
    with pytest.raises(InputError, match="no more than rounding"):
        objective(outputs, _first([(own, own)]))


def test_a_call_that_does_not_fit_is_told_what_would() -> None:
    class Two(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return one - other

    x = torch.randn(4, 3)
    with pytest.raises(InputError, match=r"2 in a tuple; in batches \(\(first, second\), labels\)"):
        smcp_fx.compress(Two(), [(x, x)])  # the second is taken for labels
    with pytest.raises(InputError, match=r"batch 1 .*fails.* It is called with \(outputs, labels\)"):
        Objective(nn.Identity(), lambda o: o.sum())(x, _first([x]))


@pytest.mark.parametrize("images", [12, 48])
def test_gradients_that_are_not_finite_are_refused_with_the_cure(images: int) -> None:
    """Also of a batch whose images are all held out."""
    torch.manual_seed(0)
    model, x = randomise(chain(8, 12)).eval(), torch.randn(images, 3, 8, 8)
    labels = [torch.ones(12, 5) for _ in range(images // 12)]
    labels[-1] = torch.zeros(12, 5)
    with pytest.raises(InputError, match=rf"batch {images // 12} .*not finite.*norms.*loss="):
        smcp_fx.compress(
            model,
            list(zip(x.split(12), labels, strict=True)),
            loss=lambda o, y: (o * y).square().sum().sqrt(),
            config=smcp_fx.PruningConfig(multiple=1),
        )


def test_a_loss_of_ones_own_tells_the_same_as_the_labels() -> None:
    """The check of a loss differentiates, too: none of that is gathered."""
    torch.manual_seed(0)
    model, x, rises = randomise(chain(8, 12)).eval(), torch.randn(12, 3, 8, 8), []
    for loss in (None, F.cross_entropy):
        prepared = smcp_fx.prepare(model, x, config=smcp_fx.PruningConfig(multiple=1))
        smcp_fx.gather_importance(prepared, [(x, torch.arange(12) % 5)], loss)
        rises.append(prepared.smcp.rises)
    first, second = rises
    assert first is not None and second is not None
    assert all((first[name] == second[name]).all() for name in first)


def test_several_outputs_count_relative_to_the_best_constant_answer() -> None:
    torch.manual_seed(0)
    whole = {
        "boxes": 30 * torch.randn(8, 5),
        "sure": torch.randn(8, 3, 2) - 5,
        "names": 4 * torch.randn(8, 2, 4),
    }
    constant = {
        "boxes": whole["boxes"].mean(0).expand(8, 5),
        "sure": whole["sure"].sigmoid().mean(0).logit().expand(8, 3, 2),
        "names": whole["names"].softmax(-1).mean(0).log().expand(8, 2, 4),
    }
    batch, kinds = _first(torch.randn(8, 3)), {"boxes": "values", "sure": "binary", "names": "classes"}
    objective = Objective(nn.Identity(), outputs=kinds)
    for name in whole:
        assert objective.distance(whole | {name: constant[name]}, whole, batch) == pytest.approx(1, rel=1e-4)
        away = {name: whole[name].clone().requires_grad_()}
        squares = [
            torch.autograd.grad(objective(whole | away, batch), away[name])[0].square().mean()
            for _ in range(20)
        ]
        alone = Objective(nn.Identity(), outputs=kinds[name])
        one = [
            torch.autograd.grad(alone(away[name], batch), away[name])[0].square().mean() for _ in range(20)
        ]
        lost = alone.distance(constant[name], whole[name], batch)
        assert float(sum(squares) / sum(one)) == pytest.approx(1 / lost, rel=0.2)
