"""Operations that mix channels, restricted to the kept ones: the functions that a graph with masks calls.

    before   norm = call_module[norm](x)                       total = x.mean(1)
    after    module = get_attr[norm]                           kept = mean_kept(x, get_attr[smcp.kept_total])
             norm = module_over_kept(module, mask, x)          total = kept.mean(1)

A mask holds ones and zeros, and broadcasts against its tensor. If all channels are kept, each function gives
the result of the plain operation. Masked channels are normalised by the statistics of the kept ones, so that
the weights that read them still get gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from smcp_fx.errors import TrainingError

# ---- before a plain operation: channels that are not kept become values that do not affect it -----------------


def zero_kept(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` with zeros in the channels that are not kept: for sums, norms and products."""
    return x * mask.to(x.dtype)


def mean_kept(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` so that its mean over all channels is the mean of the kept ones."""
    mask = mask.to(torch.promote_types(x.dtype.to_real(), torch.float32))
    return x * (mask * (mask.numel() / mask.sum().clamp(min=1))).to(x.dtype)


def lowest_kept(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` with -inf in the channels that are not kept: for maxima, and sums of exponentials."""
    return _filled(x, mask, -math.inf)


def highest_kept(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` with inf in the channels that are not kept: for minima."""
    return _filled(x, mask, math.inf)


def _filled(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """Fill masked channels; with 0 if no channel is kept: a branch that is switched off must stay finite."""
    gone = mask == 0
    return x.masked_fill(gone, torch.where(gone.all(), 0.0, value).to(x.dtype))


def one_kept(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` with ones in the channels that are not kept: for products of all channels."""
    return x.masked_fill(mask == 0, 1)


def spread_kept(x: Tensor, mask: Tensor, dims: Sequence[int], correction: int) -> Tensor:
    """Return ``x`` so that its mean and variance over ``dims`` are those of the kept channels.

    ``correction``: the number of elements minus the variance's divisor.
    """
    mask = mask.to(x.dtype)
    total = math.prod([x.shape[dim] for dim in dims])
    count = mask.sum() * (total / mask.numel())
    count = torch.where(count == 0, 1 + correction, count)  # a branch that is switched off must be finite
    mean = (x * mask).sum(tuple(dims), keepdim=True) / count
    return mean + (x - mean) * mask * ((total - correction) / (count - correction)).sqrt()


def as_it_was(x: Tensor) -> Tensor:
    """A copy of a tensor that is overwritten later, for the gradient of a mask."""
    return x.clone()


# ---- in place of a plain operation: all channels, by the statistics of the kept ones --------------------------


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, by the kept channels' statistics over ``dims``.

    Skips the mean unless ``centred``. Also returns the normalised values and the inverse divisors: a second
    backward is right only if the values that the first one reads are outputs. ``mask``, ``weight`` and
    ``bias`` have the rank of ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mask: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dims: tuple[int, ...],
        each: int,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        share = mask / (mask.sum(dims, keepdim=True) * each).clamp(min=1)
        y = x - _total(x, share, dims) if centred else x.clone()
        scale = torch.rsqrt(_total(y * y, share, dims) + eps)
        y *= scale
        out = y if weight is None else y * weight if bias is None else torch.addcmul(bias, y, weight)
        out = out + bias if weight is None and bias is not None else out.clone() if out is y else out
        ctx.save_for_backward(y, scale, share, weight)
        ctx.set_materialize_grads(False)
        ctx.dims, ctx.centred, ctx.bias = dims, centred, None if bias is None else bias.shape
        return out, y, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_out, of_y, of_scale = gradients
        y, scale, share, weight = ctx.saved_tensors
        x = torch.zeros_like(y)
        to_weight = to_bias = None
        for gradient, factor in ((of_out, weight), (of_y, None)):
            if gradient is None:
                continue
            product = gradient * y
            if gradient is of_out:
                to_weight = None if weight is None else product.sum_to_size(weight.shape)
                to_bias = None if ctx.bias is None else gradient.sum_to_size(ctx.bias)
            # The gradient through the statistics: -share * (y * sum(gradient * y) + sum(gradient)).
            through = -y * _total(product, factor, ctx.dims)
            if ctx.centred:
                through -= _total(gradient, factor, ctx.dims)
            through *= share
            through = through + gradient if factor is None else through.addcmul(gradient, factor)
            x = through * scale if gradient is of_out else x + through * scale
        if of_scale is not None:
            x = x - (scale * scale * of_scale) * share * y
        return x, None, to_weight, to_bias, None, None, None, None


def _total(x: Tensor, factor: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    """Sum ``x * factor`` over ``dims``, which stay as size 1, in as few passes over memory as possible."""
    if factor is None:
        return x.sum(dims, keepdim=True)
    is_line = dims == (x.dim() - 1,) and factor.numel() == x.shape[-1]
    if is_line and not torch.is_autocast_enabled(x.device.type):
        return torch.matmul(x, factor.flatten()).unsqueeze(-1)
    alike = [dim for dim in dims if factor.shape[dim] == 1]
    return ((x.sum(alike, keepdim=True) if alike else x) * factor).sum(dims, keepdim=True)


def _normalised(
    mask: Tensor,
    x: Tensor,
    dims: Sequence[int],
    affine: tuple[Tensor | None, Tensor | None],
    eps: float,
    centred: bool = True,
) -> Tensor:
    """Normalise ``x`` over ``dims``, in float32 at least; weight and bias may lack dimensions at the front."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    each = math.prod([x.shape[dim] // mask.shape[dim] for dim in dims])  # elements of a channel
    front = (None,) * x.dim()
    weight, bias = (None if t is None else t.to(wide.dtype)[front[t.dim() :]] for t in affine)
    results = _Normalise.apply(wide, mask.to(wide.dtype), weight, bias, tuple(dims), each, eps, centred)
    out: Tensor = results[0]
    return out


def _typed(y: Tensor, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """The result in the type of the plain operation, which the device chooses under autocast."""
    if y.dtype == x.dtype:
        return y
    return y.to(plain(x.new_ones(1, 2)).dtype if torch.is_autocast_enabled(x.device.type) else x.dtype)


def layer_norm_over_kept(
    mask: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.layer_norm` with the statistics of the kept channels."""
    dims = range(input.dim() - len(normalized_shape), input.dim())
    y = _normalised(mask, input, dims, (weight, bias), eps)
    return _typed(y, input, lambda one: F.layer_norm(one, (2,)))


def rms_norm_over_kept(
    mask: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """`F.rms_norm` with the statistics of the kept channels."""
    dims = range(input.dim() - len(normalized_shape), input.dim())
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    y = _normalised(mask, input, dims, (weight, None), eps, centred=False)
    return _typed(y, input, lambda one: F.rms_norm(one, (2,)))


def group_norm_over_kept(
    mask: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`F.group_norm` with the statistics of the kept channels."""
    parts = (num_groups, input.shape[1] // num_groups)
    line = (1, *parts, *(1 for _ in input.shape[2:]))
    weight, bias = (None if one is None else one.reshape(line) for one in (weight, bias))
    x = torch.unflatten(input, 1, parts)
    y = _normalised(torch.unflatten(mask, 1, parts), x, range(2, x.dim()), (weight, bias), eps)
    return _typed(y.flatten(1, 2), input, lambda one: F.group_norm(one, 1))


def normalize_over_kept(
    mask: Tensor, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Tensor:
    """`F.normalize` by the norm of the kept channels."""
    length: Tensor = torch.norm(input * mask.to(input.dtype), p, dim, keepdim=True)
    return input / length.clamp_min(eps)


def softmax_over_kept(mask: Tensor, input: Tensor, dim: int, *options: Any, **named: Any) -> Tensor:
    """`F.softmax` over the kept channels; masked ones get their exponentials over the kept ones' sum, 1 at most."""
    return log_softmax_over_kept(mask, input, dim, *options, **named).clamp(max=0).exp()


def log_softmax_over_kept(mask: Tensor, input: Tensor, dim: int, *options: Any, **named: Any) -> Tensor:
    """`F.log_softmax` over the kept channels. Of torch's other ``options``, only a dtype is used."""
    asked = [one for one in (*options, named.get("dtype")) if isinstance(one, torch.dtype)]
    typed = input.to(asked[0]) if asked else input
    wide = typed.float() if typed.dtype in (torch.float16, torch.bfloat16) else typed
    y = wide - torch.logsumexp(lowest_kept(wide, mask), dim, keepdim=True)
    return _typed(y, typed, lambda one: F.log_softmax(one, 1))


def batch_norm_over_kept(
    mask: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` of an input whose channels lie among the positions: the kept ones give the statistics.

    In evaluation it is the plain operation. Torch function modes see the call, as they see the plain one.
    """
    if has_torch_function_unary(input):
        named = (running_mean, running_var, weight, bias, training, momentum, eps)
        out: Tensor = handle_torch_function(batch_norm_over_kept, (input,), mask, input, *named)
        return out
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = (0, *range(2, input.dim()))
    affine = [None if t is None else t.reshape(-1, *[1] * (input.dim() - 2)) for t in (weight, bias)]
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            x = input.to(running_mean.dtype)
            kept = mask.to(x.dtype)
            count = (kept.sum() * (x.numel() // x.shape[1] // kept.numel())).clamp(min=1)
            mean = (x * kept).sum(dims, keepdim=True) / count
            var = ((x - mean).square() * kept).sum(dims, keepdim=True) / (count - 1).clamp(min=1)
            running_mean.lerp_(mean.flatten(), momentum)
            running_var.lerp_(var.flatten(), momentum)
    return _normalised(mask, input, dims, (affine[0], affine[1]), eps).to(input.dtype)


def _batch_norm_module(module: Any, mask: Tensor, input: Tensor) -> Tensor:
    """Call `batch_norm_over_kept` as `nn.BatchNorm2d` calls `F.batch_norm`."""
    if isinstance(module, nn.SyncBatchNorm) and module.training:
        raise TrainingError(
            "a SyncBatchNorm over positions that are channels cannot gather statistics of those that are kept: "
            "convert batch norms to SyncBatchNorm before smcp_fx.prepare"
        )
    momentum = module.momentum or 0.0
    if module.training and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
    statistics = module.running_mean, module.running_var
    training = module.training or module.running_mean is None
    affine = module.weight, module.bias
    return batch_norm_over_kept(mask, input, *statistics, *affine, training, momentum, module.eps)


def module_over_kept(module: Any, mask: Tensor, input: Tensor) -> Tensor:
    """Call a norm's or softmax's module with the statistics of the kept channels."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _batch_norm_module(module, mask, input)
    if isinstance(module, nn.LayerNorm):
        return layer_norm_over_kept(
            mask, input, module.normalized_shape, module.weight, module.bias, module.eps
        )
    if isinstance(module, nn.RMSNorm):
        return rms_norm_over_kept(mask, input, module.normalized_shape, module.weight, module.eps)
    if isinstance(module, nn.GroupNorm):
        return group_norm_over_kept(mask, input, module.num_groups, module.weight, module.bias, module.eps)
    log = isinstance(module, nn.LogSoftmax)
    return (log_softmax_over_kept if log else softmax_over_kept)(mask, input, module.dim)


#: By the form of a mix (`channels.trail.Mix`): the function that goes before the plain operation.
BEFORE: dict[str, Callable[..., Tensor]] = {
    "zero": zero_kept,
    "mean": mean_kept,
    "lowest": lowest_kept,
    "highest": highest_kept,
    "one": one_kept,
    "spread": spread_kept,
}
#: By the name of the operation: the function that replaces it.
IN_PLACE_OF: dict[str, Callable[..., Tensor]] = {
    "layernorm": layer_norm_over_kept,
    "rmsnorm": rms_norm_over_kept,
    "groupnorm": group_norm_over_kept,
    "batchnorm": batch_norm_over_kept,
    "normalize": normalize_over_kept,
    "softmax": softmax_over_kept,
    "logsoftmax": log_softmax_over_kept,
}
