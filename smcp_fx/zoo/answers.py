"""How much the answers of two networks agree, for outputs of any kind, and labels that stand in for a loss.

An output is class scores where it is [samples, classes], [samples, steps, classes] with many classes, or
[samples, classes, height, width]; anything else is numbers, compared relative to their own spread.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

#: Numbers at each step of a sequence are classes from so many on. Chosen, not measured.
_MANY = 16


def outputs_of(found: Any) -> tuple[Tensor, ...]:
    """Return the floating-point tensors among a network's outputs."""
    leaves = pytree.tree_leaves(found)
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


def class_axis(output: Tensor) -> int | None:
    """Return the axis of an output that holds classes; None if there is none."""
    if output.dim() == 3:
        return 2 if output.shape[2] >= _MANY else None
    return 1 if output.dim() >= 2 and output.shape[1] > 1 else None


def told(output: Tensor) -> str:
    """Say what an output is taken for."""
    axis = class_axis(output)
    shape = "x".join(map(str, output.shape[1:]))
    return f"numbers ({shape})" if axis is None else f"scores of {output.shape[axis]} classes ({shape})"


def agreement(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Return the sum over samples of how far outputs agree, each from 0 to 1: the mean over outputs.

    Of classes it is the share of equal answers, of numbers 1 less the squared error relative to their spread.
    """
    parts = [_agreement(a.float(), b.float()) for a, b in zip(found, wanted, strict=True)]
    return float(torch.stack(parts).mean(0).sum())


def _agreement(a: Tensor, b: Tensor) -> Tensor:
    axis = class_axis(b)
    if axis is not None:
        return (a.argmax(axis) == b.argmax(axis)).float().reshape(len(b), -1).mean(1)
    return (1 - _relative_error(a, b)).clamp_min(0)


def divergence(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Return the sum over samples of how far outputs are apart, the mean over outputs.

    Of classes it is the Kullback-Leibler divergence in nats, of numbers the relative squared error.
    """
    parts = []
    for a, b in zip(found, wanted, strict=True):
        axis = class_axis(b)
        if axis is None:
            parts.append(_relative_error(a.float(), b.float()))
        else:
            p, q = _log_shares(b.float(), axis), _log_shares(a.float(), axis)
            parts.append((p.exp() * (p - q)).sum(axis).reshape(len(b), -1).mean(1))
    return float(torch.stack(parts).mean(0).sum())


def _relative_error(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.reshape(len(b), -1), b.reshape(len(b), -1)
    spread = ((b - b.mean(1, keepdim=True)) ** 2).mean(1).clamp_min(1e-12)
    return ((a - b) ** 2).mean(1) / spread


def _log_shares(output: Tensor, axis: int) -> Tensor:
    """Return the logarithms of probabilities, whether an output is scores or probabilities."""
    shares = output.sum(axis)
    if bool((output >= 0).all()) and torch.allclose(shares, torch.ones_like(shares), atol=1e-3):
        return output.clamp_min(1e-12).log()
    return output.log_softmax(axis)


def drawn_labels(outputs: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return labels drawn by the network itself: classes by their probability, numbers one spread away.

    The gradients of `loss` by them are those of the Fisher information, or of the Gauss-Newton matrix.
    """
    drawn = []
    for output in outputs:
        axis = class_axis(output)
        if axis is None:
            noise = torch.randn(output.shape, generator=generator)
            drawn.append(output.detach() + output.detach().std().clamp_min(1e-12) * noise)
        else:
            shares = _log_shares(output.detach().float(), axis).exp().movedim(axis, -1)
            picks = torch.multinomial(shares.flatten(0, -2), 1, generator=generator)
            drawn.append(picks.reshape(shares.shape[:-1]))
    return tuple(drawn)


def loss(outputs: Any, labels: Any) -> Tensor:
    """Return the loss of outputs by labels that `drawn_labels` gave."""
    total = torch.zeros(())
    for output, label in zip(outputs_of(outputs), labels, strict=True):
        axis = class_axis(output)
        if axis is None:
            total = (
                total
                + ((output - label) / (output.detach() - label).std().clamp_min(1e-12)).square().mean() / 2
            )
        else:
            total = total + F.nll_loss(_log_shares(output.float(), axis).movedim(axis, 1), label)
    return total
