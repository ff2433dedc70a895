"""Example runs of models and graphs: their outputs, values of nodes, and multiply-adds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.tracing.attributes import Attributes, may_be_initialised
from smcp_fx.tracing.modes import ALWAYS, Condition, ModeInterpreter
from smcp_fx.tracing.multiply_adds import MultiplyAdds
from smcp_fx.tracing.values import info_of, plain_lists

#: max |eager - traced| may reach this share of the output's scale: both run the same kernels in the same order.
_SAME = 1e-6


def run_eager(model: nn.Module, inputs: tuple[Any, ...], run: Callable[..., Any] | None = None) -> Any:
    """Run the model (or ``run``) in eval mode without gradients, and undo changes to the model.

    It gets copies of the inputs, into which it may write.
    """
    copies: dict[int, Tensor] = {}
    inputs = pytree.tree_map(
        lambda v: copies.setdefault(id(v), v.detach().clone()) if isinstance(v, Tensor) else v, inputs
    )
    with _as_before(model), torch.no_grad():
        model.eval()
        call = getattr(model, "by_place", model) if run is None else run
        output = call(*inputs)
        return pytree.tree_map(lambda v: v, output)  # new containers: the model's own dict is emptied


class Recorder(ModeInterpreter):
    """Records the values and multiply-adds of the nodes that one mode runs."""

    def __init__(
        self, module: fx.GraphModule, training: bool, modes: Mapping[str, bool] | None = None
    ) -> None:
        super().__init__(module, training, modes)
        self.values: dict[str, Any] = {}
        self.work: dict[str, int] = {}
        self.counted = MultiplyAdds()

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Plain lists, as in the generated code: functions may write into them."""
        return plain_lists(super().fetch_args_kwargs_from_env(n))

    def run_node(self, n: fx.Node) -> Any:
        if not self.runs(n):
            return None
        before = self.counted.total
        result = super().run_node(n)
        if self.counted.total > before:
            self.work[n.name] = self.counted.total - before
        self.values[n.name] = info_of(result)
        return result


def record(module: fx.GraphModule, inputs: tuple[Any, ...]) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Run a graph in eval mode; return its output, and the values and work of its nodes, as `Traced` holds them.

    Operations of training alone run, too, for their values; buffers and the random generator are restored.
    """
    recorder, output = Recorder(module, False), None

    def run(modes: Mapping[str, bool]) -> dict[str, Any]:
        nonlocal output
        if not modes:
            with recorder.counted:
                output = run_eager(module, inputs, recorder.run)
            return recorder.values
        also = Recorder(module, False, modes)
        with unchanged(module):
            run_eager(module, inputs, also.run)
        return also.values

    values = in_all_modes(recorder.when, run)
    return output, values, recorder.work


def in_all_modes(
    when: Mapping[fx.Node, Condition], run: Callable[[Mapping[str, bool]], dict[str, Any]]
) -> dict[str, Any]:
    """The values of all nodes: first run eval mode by ``run({})``, then the modes that run the other nodes.

    ``when`` says which modes run a node; a node that no mode runs has the value None.
    """
    values = run({})
    if all(condition == ALWAYS for condition in when.values()):
        return values
    wanted = [dict.fromkeys((flag for case in cases for flag, _ in case), True) for cases in when.values()]
    in_training = {flag: True for flags in wanted for flag in flags}
    for node, cases in when.items():  # then nodes that only run in a mixture of the modes
        for modes in (in_training, *(dict(case) for case in cases)):
            if node.name not in values:
                values = run(modes) | values
    return {node.name: None for node in when} | values


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore buffers, attributes that forward sets, and the random generator."""
    devices = sorted({buffer.device.index or 0 for buffer in module.buffers() if buffer.is_cuda})
    with _as_before(module), torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    before = Attributes(module)
    kept = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    may_change = (*module.buffers(), *kept, *may_be_initialised(module))
    held = [(tensor, tensor.detach().clone()) for tensor in may_change]
    try:
        yield
    finally:
        before.restore(constants=False)
        with torch.no_grad():
            for tensor, value in held:
                if not torch.equal(tensor, value):  # a write would count as a change
                    tensor.copy_(value)


def outputs_of_modules(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Any]:
    """What the first call of each module returns in eval mode, by the module's path."""
    outputs: dict[str, Any] = {}

    def note(path: str, output: Any) -> None:
        if path not in outputs:
            outputs[path] = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, output)

    hooks = [
        module.register_forward_hook(lambda _m, _i, output, path=path: note(path, output))
        for path, module in model.named_modules()
        if path and not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a graph warns of hooks that it does not call
            run_eager(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def images_in(inputs: tuple[Any, ...]) -> int:
    """How many images the example holds; a region's own batch may be something else (boxes, say).

    The length of the first argument: a batch, or a list of images.
    """
    first = inputs[0] if inputs else None
    return len(first) if isinstance(first, (list, tuple, Tensor)) and len(first) else 1


def same_values(expected: Any, actual: Any) -> bool:
    """Whether two outputs (any pytree) hold the same tensors, up to rounding."""
    left, left_spec = pytree.tree_flatten(plain(expected))
    right, right_spec = pytree.tree_flatten(plain(actual))
    if left_spec != right_spec:
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return False
        if isinstance(a, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return False
            if not torch.allclose(a, b, rtol=0, atol=_SAME * _scale(a), equal_nan=True):
                return False
    return True


def plain(tree: Any) -> Any:
    """Return containers as dict and tuple: fx has its own kinds of them."""
    if isinstance(tree, Mapping):
        return {key: plain(value) for key, value in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f.name: plain(getattr(tree, f.name)) for f in dataclasses.fields(tree)}
    if isinstance(tree, (list, tuple)):
        return tuple(plain(value) for value in tree)
    return tree


def _scale(value: Tensor) -> float:
    if not value.numel() or not value.is_floating_point():
        return 0.0
    return float(torch.nan_to_num(value.detach(), 0.0, 0.0, 0.0).abs().max())
