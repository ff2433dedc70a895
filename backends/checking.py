"""Checks that a runtime computes the same as the module: inputs for both, and compared outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smcp_fx.backends.base import Array, to_arrays
from smcp_fx.errors import BackendError
from smcp_fx.tracing.copying import InDouble, widened

#: Largest difference over the output's scale, by the output's type: rounding of another order of summation.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2}
#: ONNX Runtime's sigmoid and tanh (1.32) are off by 2e-7, however small the result is.
ROUNDED = {"float32": 1e-6, "float16": 1e-4}
#: Two orders of summation differ by at most this many times the error of one of them. Chosen, not measured.
_ROUNDINGS = 10
#: The number of inputs, each off by a tenth of the outputs' tolerance, that show the effect of near ties.
_NEARBY = 4


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into eval mode, and every submodule back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def random_inputs(inputs: Sequence[Tensor], seed: int = 0) -> tuple[Tensor, ...]:
    """Return inputs like ``inputs``, normally distributed (integers: drawn from theirs)."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for tensor in inputs:
        shape = list(tensor.shape)
        if tensor.is_floating_point():
            drawn = torch.randn(shape, generator=generator).to(tensor.dtype)
        else:
            flat = tensor.detach().cpu().flatten()
            picks = torch.randint(max(1, flat.numel()), (int(np.prod(shape)),), generator=generator)
            drawn = flat[picks].reshape(shape)
        out.append(drawn.to(tensor.device))
    return tuple(out)


def largest_difference(actual: Array, expected: Array) -> tuple[float, float, float, float]:
    """Return (relative to the output's scale, absolute, value found, value expected) at the worst element."""
    if actual.size == 0:
        return 0.0, 0.0, 0.0, 0.0
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    difference = np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.inf)
    worst = np.unravel_index(int(np.argmax(difference)), difference.shape)
    scale = max(float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0)), 1e-12)
    absolute = float(difference[worst])
    return absolute / scale, absolute, float(a[worst]), float(b[worst])


def compare_with_module(file: Path, model: nn.Module, examples: Sequence[tuple[Tensor, ...]]) -> None:
    """Raise `BackendError` if the file in ONNX Runtime differs from the module on inputs like these."""
    from smcp_fx.backends.onnxruntime.session import create_session, run_session, session_options

    session = create_session(file, session_options())
    read, written = (
        [value.name for value in values] for values in (session.get_inputs(), session.get_outputs())
    )
    for seed, example in enumerate(examples):
        inputs = random_inputs(example, seed)
        # First: the module may write into its inputs.
        actual = run_session(session, dict(zip(read, to_arrays(inputs), strict=True)))
        expected = module_outputs(model, inputs)
        try:
            compare_outputs(actual, expected, written)
        except BackendError:
            limits = rounding(model, random_inputs(example, seed), expected)
            if not any(limits) or len(actual) != len(expected):
                raise
            for a, b, name, limit in zip(actual, expected, written, limits, strict=True):
                compare_outputs([a], [b], [name], limit=max(TOLERANCES.get(str(b.dtype), 0.0), limit))


def module_outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Array]:
    """Return the module's outputs in evaluation mode, as a runtime returns them."""
    with eval_mode(model), torch.no_grad():
        return to_arrays(flatten_outputs(model(*inputs)))


def rounding(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    outputs: Sequence[Array],
    run: Callable[[Any, tuple[Tensor, ...]], list[Array]] = module_outputs,
) -> list[float]:
    """Return how far rounding may move each output, over its scale: far if near ties decide on an order.

    The answer comes from ``run`` in double precision, if the model runs in it, and on inputs nearby.
    """
    most = [0.0] * len(outputs)
    with contextlib.suppress(Exception):  # whatever the model's code raises in another precision
        with InDouble():
            exact = run(widened(model), widened(inputs))
        most = [_ROUNDINGS * largest_difference(a, b)[0] for a, b in zip(outputs, exact, strict=True)]
    with contextlib.suppress(Exception):  # or if shapes follow from the data
        for seed in range(_NEARBY):
            other = run(model, tuple(map(_nearby, inputs, random_inputs(inputs, seed))))
            moved = (largest_difference(a, b)[0] for a, b in zip(outputs, other, strict=True))
            most = list(map(max, most, moved))
    return most


def _nearby(tensor: Tensor, noise: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + 0.1 * TOLERANCES.get(str(tensor.dtype).removeprefix("torch."), 0.0) * noise)


def compare_outputs(
    actual: Sequence[Array],
    expected: Sequence[Array],
    names: Sequence[str],
    runtime: str = "ONNX Runtime",
    limit: float | None = None,
) -> None:
    """Raise `BackendError` with both values if a runtime's outputs differ from the module's.

    ``limit``: on the difference over the output's scale; by default `TOLERANCES` of the output's type.
    """
    if len(actual) != len(expected):
        raise BackendError(
            f"{runtime} gives {len(actual)} outputs, the module {len(expected)}; no file written"
        )
    for name, a, b in zip(names, actual, expected, strict=True):
        if a.shape != b.shape:
            raise BackendError(
                f"output {name!r} has shape {a.shape} in {runtime}, {b.shape} in PyTorch; no file written"
            )
        if not np.all(np.isfinite(b)):
            raise BackendError(
                f"output {name!r} of the module is not finite on random inputs, so the ONNX file cannot "
                "be checked; no file written. Look for overflow, or pass check=False."
            )
        relative, absolute, value, reference = largest_difference(a, b)
        allowed = TOLERANCES.get(str(b.dtype), 0.0) if limit is None else limit
        if not (relative <= allowed or absolute <= ROUNDED.get(str(b.dtype), 0.0)):
            raise BackendError(
                f"output {name!r} differs: {runtime} computes {value:.9g} where PyTorch computes "
                f"{reference:.9g} (difference {absolute:.3g}, {relative:.3g} of the output's scale, limit "
                f"{allowed:g}); no file written"
            )


def flatten_outputs(outputs: Any) -> list[Tensor]:
    """Return the tensors in a module's outputs (a tensor, or nested tuples, lists and dicts), in order."""
    leaves, _ = torch.utils._pytree.tree_flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
