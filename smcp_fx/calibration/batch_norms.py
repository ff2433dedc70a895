"""Re-estimates the running statistics of batch norms from data."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smcp_fx.calibration.batches import device_of, each_batch, run_batch
from smcp_fx.errors import InputError
from smcp_fx.interface.wrapping import unwrapped
from smcp_fx.masking.kept_statistics import batch_norm_over_kept
from smcp_fx.outcomes import in_mode

_SIGNATURES = {norm: inspect.signature(norm) for norm in (F.batch_norm, batch_norm_over_kept)}


def recalibrate(model: nn.Module, batches: Any) -> None:
    """Re-estimate the running statistics of a model's batch norms, in place.

    Means and variances become those of all the data that reaches each norm while the norms before it use
    batch statistics. Dropout and other training behaviour is off meanwhile. Do this after pruning, after
    training with a small momentum, and after averaging weights.

    Args:
        model: any module: plain, prepared or converted, on one device.
        batches: a tensor, or an iterable (a list, a data loader) of tensors, dicts of keyword inputs, or
            (inputs, labels), whose labels are ignored. Read once; without a length, 2 GiB at most.

    Raises `InputError`, and leaves the model as it was, if batches do not fit or are missing, values are not finite,
    or no batch norm has running statistics.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"recalibrate needs an nn.Module, not {type(model).__name__}")
    model = unwrapped(model)
    device, watch = device_of(model), _Watch()
    with torch.no_grad(), in_mode(model, False):
        for batch in each_batch(batches):
            with watch:
                run_batch(model, batch.to(device))
            watch.batches = batch.number
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    if not watch.moments:
        raise InputError(
            f"{type(model).__name__} ran no batch norm that keeps running statistics: there is nothing to estimate"
        )
    estimates = []
    for mean, variance, moments in watch.moments.values():
        new = moments.mean.to(mean), moments.variance.to(variance)
        if not all(bool(torch.isfinite(value).all()) for value in new):
            name = names.get(id(mean), "running_mean").rpartition(".")[0]
            raise InputError(
                f"what reaches batch norm {name!r} has a mean or variance that is not finite in {mean.dtype}: some "
                "activations are NaN or infinite"
            )
        estimates.append((mean, variance, *new))
    with torch.no_grad():
        for mean, variance, new_mean, new_variance in estimates:
            mean.copy_(new_mean)
            variance.copy_(new_variance)
        for module in model.modules():
            counter = getattr(module, "num_batches_tracked", None)
            if id(getattr(module, "running_mean", None)) in watch.moments and isinstance(counter, Tensor):
                counter.fill_(watch.batches)


class Moments:
    """Mean and variance of each channel over everything added, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())  # sum of squared distances from the mean

    def add(self, x: Tensor) -> None:
        """Add a tensor [N, channels, ...]."""
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        rows, count = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2), x.numel() // x.shape[1]
        # Two passes along rows are ten times as fast as `var_mean` over several dimensions.
        mean = rows.sum(-1).double().sum(0) / count
        squares = torch.linalg.vector_norm(rows - mean.to(x).unsqueeze(1), dim=-1).double().square().sum(0)
        if not self.count:
            self.mean, self._squares = torch.zeros_like(mean), torch.zeros_like(mean)
        total = self.count + count
        distance = mean - self.mean
        self.mean = self.mean + distance * (count / total)
        self._squares = self._squares + squares + distance**2 * (self.count * count / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """The unbiased variance, as batch norms keep it."""
        return self._squares / max(self.count - 1, 1)


class _Watch(TorchFunctionMode):
    """Makes batch norms normalise by the batch, and gathers the moments of each one's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.moments: dict[int, tuple[Tensor, Tensor, Moments]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SIGNATURES:
            return func(*args, **kwargs)
        bound = _SIGNATURES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        named = bound.arguments
        mean, variance, x = named["running_mean"], named["running_var"], named["input"]
        if not isinstance(mean, Tensor):
            return func(*args, **kwargs)
        if "mask" in named:  # some positions are pruned channels
            mask = named["mask"]
            dim = max(range(mask.dim()), key=lambda d: mask.shape[d])
            x = x.index_select(dim, mask.flatten().nonzero().flatten())
        self.moments.setdefault(id(mean), (mean, variance, Moments()))[2].add(x)
        named.update(running_mean=None, running_var=None, training=True)
        return func(*bound.args, **bound.kwargs)
