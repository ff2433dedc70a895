"""Random weights, statistics and masks for any model, for sensitive comparisons with little rounding."""

from __future__ import annotations

import copy
from typing import Any

from comparison import run

#: Strength of the batch norms in networks so deep that at full strength they amplify rounding beyond any limit.
CALM = 0.3


def randomise(model: Any, strength: float | None = None) -> None:
    """Change every weight, statistic and shift from its initial value; weights keep their scale.

    ``strength``: of batch norms; by default 1, or 0.3 in a network of 150 or more.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    # Branches at full strength would make a hundred random blocks chaotic: each amplifies what came before.
    gain = strength if strength is not None else 1.0 if len(norms) < 150 else CALM
    with torch.no_grad():
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or not tensor.is_floating_point():
                    continue
                noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                if name == "running_var":
                    tensor.copy_(0.5 + noise.abs())
                elif tensor.dim() > 1 and float(tensor.std()) > 0:
                    tensor.mul_(1 + 0.3 * noise)
                elif name in ("weight", "gain", "gamma"):
                    tensor.copy_((1 + 0.3 * noise) * (gain if module in norms else 1))
                elif isinstance(tensor, torch.nn.Parameter):
                    tensor.add_(0.3 * noise)


def calibrate(prepared: Any, inputs: tuple[Any, ...]) -> None:
    """Set statistics near those of the masked network's images, so that activations neither vanish nor explode."""
    import torch

    original = torch.nn.functional.batch_norm

    def forgetful(x: Any, mean: Any, var: Any, *rest: Any, **named: Any) -> Any:
        named.update(zip(("weight", "bias", "training", "momentum", "eps"), rest, strict=False))
        named.update(momentum=1.0)
        return original(x, mean, var, **named)

    torch.nn.functional.batch_norm = forgetful  # modules and graphs alike look it up when they run
    try:
        run(prepared.train(), inputs)
    finally:
        torch.nn.functional.batch_norm = original
    for norm in prepared.modules():
        if not isinstance(norm, torch.nn.modules.batchnorm._BatchNorm) or norm.running_mean is None:
            continue
        norm.running_mean += 0.2 * torch.randn_like(norm.running_mean) * norm.running_var.sqrt()
        norm.running_var.clamp_(min=0.5 * float(norm.running_var.mean()))  # none that amplifies rounding
        norm.running_var *= 0.7 + 0.6 * torch.rand_like(norm.running_var)
    prepared.eval()


def random_masks(prepared: Any) -> dict[str, Any]:
    """A random mask for every free group that keeps three of five units, at least one."""
    import torch

    masks = {}
    for group in prepared.channels.groups:
        if group.free:
            mask = torch.rand(group.size) < 0.6
            mask[int(torch.randint(group.size, (1,)))] = True
            masks[group.name] = mask
    return masks


def last_bits(model: Any) -> Any:
    """Return a copy with weights one unit in the last place larger or smaller."""
    import torch

    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            up = torch.rand_like(parameter) < 0.5
            parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf).to(parameter)))
    return moved
