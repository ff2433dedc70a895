"""The loss of a batch's outputs; its gradients give the worth of channels.

If the user gives no loss, it is a random one. Its gradient g satisfies E[g g'] = the curvature of a distance
between outputs (each image apart), so that half its square is the rise of that distance to second order:

- classes and yes or no: cross entropy of the labels. Without labels, of soft labels p - sqrt(p) e, where p is
  the prediction and e are random signs orthogonal to sqrt(p). Their gradients have the covariance diag(p) - p
  p', as with labels drawn from p, but no rare large values: a class of probability 1e-4 draws 1e-2 each time
  instead of 1 once in 10,000 images; two classes always draw the same amount. The distance is the
  Kullback-Leibler divergence, the mean over positions (Fisher information).
- values: the sum of the outputs, each with a random sign, over sqrt(n variance / 2). The distance is the squared
  error relative to the outputs' variance, the mean over the n values of an image (Gauss-Newton matrix by random
  projections, Hutchinson 1990).

The distances of several outputs add up, each divided by the best constant answer's: the variance for values,
the divergence from the mean prediction for classes and yes or no. Otherwise a mostly certain map would count
for nothing beside boxes. The distance itself is no loss: at the model's own outputs its gradients are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smcp_fx.calibration.batches import Batch
from smcp_fx.errors import InputError, SmcpError, first_line
from smcp_fx.output_kinds import (
    HALF_SUM,
    Kinds,
    Reading,
    answers_fit,
    labels_of,
    misfit,
    named_tensors,
    numbers_fit,
    read_outputs,
    spread,
    told,
)
from smcp_fx.pruning.loop_watch import tell

Loss = Callable[[Any, Any], Tensor]
#: Below this value of `cancelled`, a loss is at its minimum. Measured on ten small networks: at most 1e-5
#: with the network's own outputs as labels, 1e-4 after training to convergence, 0.09 or more after usual
#: training.
_ROUNDING = 1e-4
#: Least distance of the best constant answer, in nats: outputs that hardly change get no huge weights.
#: Chosen, like the limit in `spread`.
_LEAST = 1e-4
#: The label that means no class, as in `torch.nn.functional.cross_entropy`.
_NO_CLASS = -100


class Objective:
    """The loss of a network's outputs, whose kinds are read from the first batch.

    Args:
        model: the prepared model.
        loss: the user's function of (outputs, labels).
        outputs: the kinds of outputs, if the user gives them.
        quiet: neither report the kinds nor check the user's loss.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None = None, outputs: Kinds | None = None, quiet: bool = False
    ) -> None:
        if loss is not None and outputs is not None:
            raise InputError("give loss= or outputs=, not both: a loss of your own needs no kinds of outputs")
        if loss is not None and not callable(loss):
            raise InputError(f"loss must be a function of (outputs, labels), not {loss!r}")
        self._model, self._loss, self._outputs, self._quiet = model, loss, outputs, quiet
        self._readings: dict[str, Reading] | None = None
        self._scales: dict[str, float] = {}
        self._weights: dict[str, float] = {}  # of class and yes-or-no outputs, if there are several outputs
        self._checks = not quiet

    @torch.no_grad()
    def drawn(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return soft labels for each class or yes-or-no output, drawn around the model's predictions."""
        labels, tensors = {}, named_tensors(outputs)
        for name, reading in self.read(outputs, batch).items():
            if reading.kind == "values" or name not in tensors:
                continue
            scores = reading.scores(tensors[name])
            _require_finite(scores, batch)
            if reading.kind == "classes":
                p = scores.softmax(-1)
                labels[name] = (p - p.sqrt() * _orthogonal_signs(p.sqrt())).movedim(-1, reading.dim)
            else:
                p = scores.sigmoid()
                labels[name] = p + (p * (1 - p)).sqrt() * _signs(p)
        return labels

    def __call__(self, outputs: Any, batch: Batch) -> Tensor:
        """Return a finite number that has a gradient."""
        if self._loss is None:
            self.read(outputs, batch)
        try:
            value = self._own(outputs, batch) if self._loss is None else self._loss(outputs, batch.labels)
        except SmcpError:
            raise
        except Exception as error:
            raise InputError(
                f"the loss of {batch} fails: {type(error).__name__}: {first_line(error)} It is called with "
                "(outputs, labels), as the model returns the ones and the batch holds the others"
            ) from error
        number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not number or not bool(torch.isfinite(value).all()):
            shown = (
                f"of shape {tuple(value.shape)}"
                if isinstance(value, Tensor) and value.numel() != 1
                else f"{value}"
            )
            raise InputError(
                f"the loss of {batch} is {shown}; it must be one finite real number, as a tensor"
            )
        if not value.requires_grad:
            raise InputError(
                f"the loss of {batch} has no gradient: it must be computed from the outputs, by torch"
            )
        own = self._loss is not None or bool(named_tensors(batch.labels))  # class numbers are no outputs
        slope = cancelled(value, outputs) if own and self._checks else 1.0
        if slope < _ROUNDING:
            raise InputError(
                f"the gradient of the loss of {batch} is no more than rounding: the loss is at its minimum at this "
                "network, as it is where the labels are its own outputs. Leave the labels and loss= away: what "
                "channels are worth is then told by the outputs alone"
            )
        self._checks &= math.isinf(slope)  # this batch showed nothing: check the next one
        return value

    @torch.no_grad()
    def distance(self, outputs: Any, whole: Any, batch: Batch) -> float:
        """Return the distance of a batch's outputs from the whole network's; the user's loss, if given.

        For one output: the divergence in nats (classes, yes or no; the mean over positions), or the squared
        error of values relative to their variance. For several: the sum, each relative to the best constant
        answer.
        """
        if self._loss is not None:
            return float(self._loss(outputs, batch.labels))
        total, ours, theirs = 0.0, named_tensors(outputs), named_tensors(whole)
        for name, reading in self.read(whole, batch).items():
            if name not in ours or name not in theirs:
                continue
            a, b = reading.scores(ours[name]), reading.scores(theirs[name])
            weight = self._weights.get(name, 1.0)
            if reading.kind == "classes":
                away = F.kl_div(a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="none")
                total += weight * float(away.sum(-1).mean())
            elif reading.kind == "binary":
                p = b.sigmoid()
                total += weight * float(
                    F.binary_cross_entropy_with_logits(a, p) - F.binary_cross_entropy_with_logits(b, p)
                )
            else:
                total += float((a - b).square().sum()) / batch.images * self._scales[name] ** 2 / 2
        return total

    def _own(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the sum of all outputs' parts, each a mean over images."""
        readings, tensors = self.read(outputs, batch), named_tensors(outputs)
        labelled = [name for name, reading in readings.items() if reading.kind != "values"]
        if batch.labels is not None and labelled:
            labels = labels_of(labelled, batch.labels)
        else:
            labels = self.drawn(outputs, batch)
        parts = [
            self._part(name, reading, tensors[name], labels.get(name), batch)
            for name, reading in readings.items()
            if name in tensors  # detectors' outputs vary from image to image
        ]
        if not parts:
            raise InputError(
                f"the model's output for {batch} holds nothing of what it held for the first one"
            )
        return torch.stack(parts).sum()

    def _part(
        self, name: str, reading: Reading, tensor: Tensor, labels: Tensor | None, batch: Batch
    ) -> Tensor:
        scores = reading.scores(tensor)
        if reading.kind == "values":
            _require_finite(scores, batch)
            return (scores * _signs(scores)).sum() * (self._scales[name] / batch.images)
        assert labels is not None
        weight = self._weights.get(name, 1.0)
        if reading.kind == "binary":
            _require_fit(answers_fit(labels, tensor.shape), name, tensor, labels, batch)
            labels = labels.reshape(scores.shape).to(scores.dtype)
            if batch.labels is not None:
                _require_within(labels, 1, "yes or no", batch)
            return F.binary_cross_entropy_with_logits(scores, labels) * math.sqrt(
                weight * scores.numel() / batch.images
            )
        rows = scores.flatten(0, -2)
        if labels.shape == tensor.shape:  # probabilities of classes
            targets = labels.movedim(reading.dim, -1).reshape(rows.shape).to(rows.dtype)
            if batch.labels is not None:
                _require_shares(labels, reading.dim, batch)
        else:
            _require_fit(numbers_fit(labels, tensor.shape, reading.dim), name, tensor, labels, batch)
            targets = labels.reshape(rows.shape[:1]).long()
            counted = targets[targets != _NO_CLASS]
            if not counted.numel():
                raise InputError(
                    f"all labels of {batch} are {_NO_CLASS}, which counts for nothing: leave it away"
                )
            _require_within(
                counted, rows.shape[1] - 1, f"{rows.shape[1]} classes ({_NO_CLASS} is no class)", batch
            )
        return F.cross_entropy(rows, targets) * math.sqrt(weight * rows.shape[0] / batch.images)

    def read(self, outputs: Any, batch: Batch) -> dict[str, Reading]:
        """Return the kinds of outputs; reports them once, if the user has not given them."""
        if self._readings is not None:
            return self._readings
        readings = read_outputs(outputs, self._outputs, batch.labels, self._model)
        tensors = named_tensors(outputs)
        first = next(iter(readings.values()))
        if (
            len(readings) == 1
            and first.kind == "values"
            and not (first.given or first.why)
            and math.prod(first.shape) == batch.images
        ):
            raise InputError(
                f"the model's output {list(first.shape)} is one number an image: a value, or the score of yes or no? "
                "Say which: outputs='values' or outputs='binary'; or give loss=, a function of (outputs, labels)"
            )
        for name, reading in readings.items():
            if reading.kind == "values":
                values = reading.scores(tensors[name])
                _require_finite(values, batch)
                variance, number = float(spread(values)), values.numel() / batch.images
                self._scales[name] = math.sqrt(2 / (number * variance)) if variance else 0.0
            elif len(readings) > 1:
                away = float(_from_mean(reading.scores(tensors[name]), reading.kind))
                self._weights[name] = 1 / max(away, _LEAST)
        if not self._quiet and not all(reading.given for reading in readings.values()):
            tell(
                f"{told(readings, outputs)}. If that is wrong, say what it is, with outputs= or loss=.",
                UserWarning,
            )
        self._readings = readings
        return readings


def cancelled(value: Tensor, outputs: Any) -> float:
    """Return the ratio of a loss's gradient to one that cannot cancel: about 1 away from the loss's minimum.

    The ratio is infinite if both are zero, as for a margin loss within its margin.

    The other gradient weights the outputs with random signs times the size of the loss's own derivatives,
    plus their change over a standard deviation. Takes two more backward passes.
    """
    tensors = [t for t in named_tensors(outputs).values() if t.requires_grad and not t.is_complex()]
    slopes = partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    first = torch.autograd.grad(value, tensors, create_graph=True, allow_unused=True, materialize_grads=True)
    steps = [_signs(t) * spread(t.float()).sqrt().to(t.dtype) for t in tensors]
    moved = torch.stack([(g * s).sum() for g, s in zip(first, steps, strict=True)]).sum()
    try:
        bent = slopes(moved, tensors, materialize_grads=True)
    except RuntimeError:  # linear, or differentiable only once
        bent = tuple(torch.zeros_like(t) for t in tensors)
    weights = [(g.detach().abs() + b.abs()) * _signs(b) for g, b in zip(first, bent, strict=True)]
    learning = _learning(value)
    own = _norm(slopes(value, learning))
    other = _norm(slopes(tensors, learning, weights))
    return own / other if other else math.inf


def _signs(like: Tensor) -> Tensor:
    return torch.randint_like(like, 2) * 2 - 1


@torch.no_grad()
def _from_mean(scores: Tensor, kind: str) -> Tensor:
    """Return the mean divergence of predictions from their mean over images, in nats: the best constant answer's."""
    logs = scores.log_softmax(-1) if kind == "classes" else F.logsigmoid(torch.stack([-scores, scores], -1))
    p = logs.exp()
    mean = p.mean(0) if len(p) > 1 else p.flatten(0, -2).mean(0)
    return (torch.xlogy(p, p) - p * mean.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1).mean()


def _orthogonal_signs(unit: Tensor) -> Tensor:
    """Return random signs orthogonal to ``unit`` [..., n], reflected off its largest axis (Householder)."""
    largest = torch.zeros_like(unit).scatter_(-1, unit.argmax(-1, keepdim=True), 1)
    signs, axis = _signs(unit) * (1 - largest), unit + largest
    return signs - axis * (2 * (signs * axis).sum(-1, keepdim=True) / axis.square().sum(-1, keepdim=True))


def _require_finite(values: Tensor, batch: Batch) -> None:
    if not bool(torch.isfinite(values.detach()).all()):
        raise InputError(f"the model's outputs for {batch} are NaN or infinite: look at its activations")


def _require_fit(fits: bool, name: str, tensor: Tensor, labels: Tensor, batch: Batch) -> None:
    if not fits:
        raise InputError(f"{batch}: {misfit(name, tuple(tensor.shape), labels)}")


def _require_shares(labels: Tensor, dim: int, batch: Batch) -> None:
    """Require that labels of the output's own shape are probabilities of its classes."""
    if not bool((labels >= 0).all()) or not bool(((labels.float().sum(dim) - 1).abs() < HALF_SUM).all()):
        raise InputError(
            f"the labels of {batch} do not sum to one over the classes, dimension {dim} of the output: are they "
            "values, or yes or no (several at a time)? Say so with outputs=, or give loss=, a function of "
            "(outputs, labels)"
        )


def _require_within(labels: Tensor, most: float, kind: str, batch: Batch) -> None:
    if labels.numel() and not (float(labels.min()) >= 0 and float(labels.max()) <= most):
        raise InputError(
            f"the labels of {batch} go from {float(labels.min()):g} to {float(labels.max()):g}, but the output is "
            f"taken for scores of {kind}: say what it is with outputs=, or give loss=, a function of (outputs, "
            "labels)"
        )


def _learning(value: Tensor) -> list[Tensor]:
    """Return all leaf tensors that accumulate gradients of ``value``."""
    leaves, seen, waiting = [], set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting.extend(before for before, _ in node.next_functions)
    return leaves


def _norm(gradients: Iterable[Tensor | None]) -> float:
    return math.sqrt(sum(float(g.detach().double().square().sum()) for g in gradients if g is not None))
