"""The operations of a TorchScript graph as the Python that was compiled to them."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MANGLED = re.compile(r"\.___torch_mangle_\d+")
_FUNCTIONS = "torch.nn.functional."
#: What stands for "to the end".
_END = 2**63 - 1
_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, None, None, None, torch.bfloat16,
)  # fmt: skip
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


class UnknownOperationError(Exception):
    """A script holds an operation that is not known here."""


def plain_name(name: str) -> str:
    """The name that a class or function has in Python."""
    return _MANGLED.sub("", name).removeprefix("__torch__.")


def called(value: Any) -> Any:
    """The function that a graph calls: of torch.nn.functional, or a scripted one."""
    name = plain_name(value.type().annotation_str)
    if name.startswith(_FUNCTIONS) and hasattr(F, name.removeprefix(_FUNCTIONS)):
        return getattr(F, name.removeprefix(_FUNCTIONS))
    found = torch.jit._state._python_cu.find_function(value.type().annotation_str)
    if found is None:
        raise UnknownOperationError(name)
    return found


def plain_operation(node: Any) -> Callable[..., Any]:
    """The function that does what a node does, of what it reads."""
    kind = node.kind()
    if kind in ("prim::If", "prim::Loop", "prim::CallMethod", "prim::SetAttr"):
        return _refused
    if kind == "prim::Constant":
        return functools.partial(_same, _constant(node))
    if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
        return functools.partial(_unpacked, node.outputsSize())
    if kind in _PLAIN:
        return _PLAIN[kind]
    space, _, name = kind.partition("::")
    if space != "aten":
        raise UnknownOperationError(kind)
    if not any(map(_holds_tensors, (*node.inputs(), *node.outputs()))):
        if name in _OF_NUMBERS:
            return _OF_NUMBERS[name]
        raise UnknownOperationError(f"{kind} of numbers")
    return _OF_TENSORS[name] if name in _OF_TENSORS else _by_schema(node, name)


def _holds_tensors(value: Any) -> bool:
    return value.type().kind() == "TensorType" or "Tensor" in value.type().str()


def _refused(*_: Any) -> Any:
    raise UnknownOperationError


def _same(value: Any, *_: Any) -> Any:
    return value


def _constant(node: Any) -> Any:
    output = node.output()
    if output.type().kind() in ("NoneType", "FunctionType"):
        return None
    value = output.toIValue()
    return value.item() if isinstance(value, Tensor) and not value.dim() else value


def is_number(node: Any) -> bool:
    """Is it a number that a trace holds as a tensor?"""
    if node.kind() != "prim::Constant" or node.output().type().kind() != "TensorType":
        return node.kind() == "prim::NumToTensor"  # type: ignore[no-any-return]
    return not isinstance(_constant(node), Tensor)


def number_operation(name: str) -> Callable[..., Any]:
    """The operation of this name on numbers that a trace holds as tensors."""
    plain = {"floor_divide": "floordiv", "rsub": "sub"}.get(name, name)
    if plain not in _OF_NUMBERS or name == "rsub":
        raise UnknownOperationError(f"aten::{name} of numbers")
    operation = _OF_NUMBERS[plain]
    return (lambda a, b, *_: operation(a, b)) if plain in _OF_TWO else operation


def _unpacked(count: int, given: Any) -> list[Any]:
    return [given[place] for place in range(count)]


def _raised(message: Any, *_: Any) -> Any:
    raise RuntimeError(str(message))


def _by_schema(node: Any, name: str) -> Callable[..., Any]:
    """A function or method of this name, given what is not left out by default."""
    function = next(
        (found for space in (torch, torch._C._nn, F) if (found := getattr(space, name, None))), None
    )
    if function is None and not hasattr(Tensor, name):
        raise UnknownOperationError(node.kind())
    arguments = [*torch._C.parse_schema(node.schema()).arguments]

    def call(*given: Any) -> Any:
        own = [_enumerated(argument.name, value) for argument, value in zip(arguments, given, strict=True)]
        named = {
            a.name: value
            for a, value, raw in zip(arguments, own, given, strict=True)
            if a.kwarg_only and not _is_default(a, raw)
        }
        placed = [
            (a, value, raw) for a, value, raw in zip(arguments, own, given, strict=True) if not a.kwarg_only
        ]
        while placed and _is_default(placed[-1][0], placed[-1][2]):
            placed.pop()
        args = [value for _, value, _ in placed]
        return (
            function(*args, **named) if function is not None else getattr(args[0], name)(*args[1:], **named)
        )

    return call


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value():
        return False
    default = argument.default_value
    plain = isinstance(value, (bool, int, float, str, type(None), list))
    return plain and type(value) is type(default) and value == default


def _enumerated(name: str, value: Any) -> Any:
    """Types and memory formats are numbers in a graph."""
    if type(value) is int and name == "dtype":
        return _DTYPES[value]
    return _FORMATS[value] if type(value) is int and name == "memory_format" else value


def _sliced(tensor: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    part = slice(None if start == 0 else start, None if end == _END else end, None if step == 1 else step)
    ahead = (slice(None),) * dim if dim >= 0 else (...,)
    return tensor[(*ahead, part, *(slice(None),) * (-dim - 1 if dim < 0 else 0))]


def _indexed(tensor: Any, indices: list[Any]) -> Any:
    return tensor[tuple(slice(None) if index is None else index for index in indices)]


def _convolution(x: Any, weight: Any, bias: Any, *how: Any) -> Any:
    stride, padding, dilation, transposed, output_padding, groups = how[:6]
    if transposed:
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(stride) - 1]
        return function(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return (F.conv1d, F.conv2d, F.conv3d)[len(stride) - 1](x, weight, bias, stride, padding, dilation, groups)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: Any, momentum: Any, eps: Any, *_: Any
) -> Any:
    return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)


def _interpolated(mode: str, x: Any, size: Any, *how: Any) -> Any:
    """`upsample_bilinear2d(x, size, align_corners, factors)` and its like."""
    align = how[0] if mode != "nearest" else None
    factors = how[-1] if how and isinstance(how[-1], list) else None
    return F.interpolate(x, None if factors else size, factors, mode, align)


#: Of lists, whatever they hold.
_OF_LISTS: dict[str, Callable[..., Any]] = {
    "len": len,
    "list": list,
    "copy": list,
    "append": lambda items, item: items.append(item) or items,
    "extend": lambda items, others: items.extend(others),
    "insert": lambda items, place, item: items.insert(place, item),
    "__getitem__": operator.getitem,
    "_set_item": operator.setitem,
    "__is__": operator.is_,
    "__isnot__": operator.is_not,
    "_unwrap_optional": lambda x: x,
}

_OF_TENSORS: dict[str, Callable[..., Any]] = {
    **_OF_LISTS,
    "slice": _sliced,
    "index": _indexed,
    "_convolution": _convolution,
    "batch_norm": _batch_norm,
    "embedding": lambda weight, indices, *_: F.embedding(indices, weight),
    "size": lambda x, *dim: x.size(*dim),
    "dim": lambda x: x.dim(),
    "numel": lambda x: x.numel(),
    "layer_norm": lambda *given: F.layer_norm(*given[:5]),
    "group_norm": lambda *given: F.group_norm(*given[:5]),
    "Int": int,
    "Float": float,
    "Bool": bool,
    "upsample_nearest2d": functools.partial(_interpolated, "nearest"),
    "upsample_bilinear2d": functools.partial(_interpolated, "bilinear"),
    "upsample_bicubic2d": functools.partial(_interpolated, "bicubic"),
}

_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    **_OF_LISTS,
    **{
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "neg", "eq", "ne", "lt", "le", "gt", "ge", "pow")
    },
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "remainder": operator.mod,
    "__contains__": operator.contains,
    "__not__": operator.not_,
    "__and__": lambda a, b: a and b,
    "__or__": lambda a, b: a or b,
    "sum": sum,
    "slice": lambda items, start, end, step: items[slice(start, None if end == _END else end, step)],
    "Int": lambda x: x if type(x) is not float else int(x),
    "Float": lambda x: x * 1.0,
    "Bool": bool,
    "format": lambda text, *given: str(text).format(*given),
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
    "warn": lambda *_: None,
    "__range_length": lambda low, high, step: len(range(low, high, step)),
    "__derive_index": lambda index, start, step: start + index * step,
}

#: Those that a trace gives a factor for the second operand, or how to round.
_OF_TWO = ("add", "sub", "mul", "div", "floordiv", "remainder", "pow")

_PLAIN: dict[str, Callable[..., Any]] = {
    "prim::ListConstruct": lambda *items: [*items],
    "prim::TupleConstruct": lambda *items: items,
    "prim::TupleIndex": operator.getitem,
    "prim::DictConstruct": lambda *items: dict(zip(items[::2], items[1::2], strict=True)),
    "prim::RaiseException": _raised,
    "prim::Uninitialized": lambda: None,
    "prim::NumToTensor": lambda x: x,
    "prim::unchecked_cast": lambda x: x,
    "prim::unchecked_unwrap_optional": lambda x: x,
    "prim::dtype": lambda x: x.dtype,
    "prim::device": lambda x: x.device,
    "prim::data": lambda x: x.data,
    "prim::requires_grad": lambda x: x.requires_grad,
    "prim::is_nested": lambda _: False,
    "prim::min": lambda *given: min(*given),
    "prim::max": lambda *given: max(*given),
}
