"""Proxies for tensors, and for numbers computed from them, while a model is traced.

Python's questions (`isinstance(x, Tensor)`, `x.shape[1] in table`, `np.sqrt(h)`, `"Half" in x.type()`) get the
example's answers; `x[:, :4] = y` becomes a node. What a graph cannot express is refused.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, Proxy
from torch.utils import _pytree as pytree

from smcp_fx.errors import TraceError
from smcp_fx.tracing.constant_values import overwritten
from smcp_fx.tracing.frames import asks_for_type, in_library, instruction_of, looks_up
from smcp_fx.tracing.in_place import PLAIN
from smcp_fx.tracing.plain_attention import attend_by_function
from smcp_fx.tracing.sentences import express
from smcp_fx.tracing.trees import leaf_class, leaves_of

#: Functions of numpy that give the same as Python's for single numbers; those in `_FLOATS` give a float.
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "power": operator.pow,
    "negative": operator.neg, "sqrt": math.sqrt, "ceil": math.ceil, "floor": math.floor, "trunc": math.trunc,
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
    "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip
#: Questions about kinds of tensors that no traced network has.
_NEVER = {"is_mkldnn", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr"}
_FLOATS = {"ceil", "floor", "trunc"}
_PRODUCT = math.prod  # taken here, as those above: while torch.fx traces, `math` holds other functions


class AnsweringProxy(Proxy):
    """Answers Python's questions by the node's value on the example inputs."""

    tracer: Any  # the `ShapeTracer` that it comes from

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type of the value, for `isinstance`.

        Only for questions of the model itself: C code that checks for a tensor would take the proxy for one.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == "__instancecheck__":
            frame = frame.f_back
        asked = frame is not None and not in_library(frame) and asks_for_type(frame)
        return self.tracer.kind(self) if asked else type(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_is_param":  # asked by `isinstance(x, nn.Parameter)`
            return issubclass(self.tracer.kind(self), nn.Parameter)
        if name in _NEVER and self.tracer.is_tensor(self):
            return False
        if not hasattr(Tensor, name):  # `hasattr(x, "tensors")` is False of a tensor
            if name.startswith("__"):
                raise AttributeError(name)
            kind = self.tracer.kind(self)
            if not hasattr(self.tracer.value(self.node), name):
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        attribute = ValueAttribute(self, name)
        if name == "data":
            attribute.node  # noqa: B018 (made now: another tensor may be assigned before it is read)
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(Tensor, name) and not in_library(sys._getframe(1)):
            if name == "data" and self.node.op == "get_attr":
                self.tracer.create_proxy("call_function", overwritten, (self, value), {})
                return
            if name == "requires_grad" and value is True and self.node.op != "get_attr":
                self.tracer.create_proxy("call_method", "requires_grad_", (self,), {})
                return
            raise TraceError(
                f"{express(self.node)}.{name} is assigned, which a graph does not do; write into the tensor "
                "(`x.copy_(...)`), or use another name"
            )
        super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)  # type: ignore[misc]
        if is_given(self.node) and not self.tracer.is_tensor(self):
            return self.tracer.known(part, self.tracer.value(part.node))
        return part

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __contains__(self, item: Any) -> bool:
        value = self.tracer.value(self.node)
        if isinstance(value, dict) and not isinstance(item, Proxy) and not is_given(self.node):
            return item in value  # the structure of the graph's own values follows from the operations
        return bool(self.tracer.create_proxy("call_function", operator.contains, (self, item), {}))

    def __hash__(self) -> int:
        frame = sys._getframe(1)
        if in_library(frame) or self.tracer.is_tensor(self):
            return object.__hash__(self)
        # `functools.lru_cache` would keep a traced value, and return it to other models.
        if not looks_up(frame):
            raise TypeError(
                f"a number of the traced graph cannot be hashed here: write int({express(self.node)})"
            )
        return hash(self.tracer.number(self))

    def __int__(self) -> int:
        return int(self.tracer.number(self))

    def __index__(self) -> int:
        return operator.index(self.tracer.index(self, sys._getframe(1)))

    def __float__(self) -> float:
        return float(self.tracer.number(self))

    def __len__(self) -> int:
        return int(self.tracer.length(self))

    def __round__(self, digits: int | None = None) -> Any:
        arguments = (self,) if digits is None else (self, digits)
        return self.tracer.create_proxy("call_function", round, arguments, {})

    def __divmod__(self, other: Any) -> tuple[Proxy, Proxy]:
        return self // other, self % other

    def __iter__(self) -> Any:
        instruction = instruction_of(sys._getframe(1))
        if instruction is None or instruction.opname != "UNPACK_SEQUENCE":
            return self.tracer.iter(self)
        self.tracer.check_parts(self)
        return iter([self[place] for place in range(instruction.argval)])

    def __str__(self) -> str:
        return repr(self) if in_library(sys._getframe(1)) else self._text()

    def __format__(self, form: str) -> str:
        return format(repr(self) if in_library(sys._getframe(1)) else self._text(), form)

    def _text(self) -> str:
        """The name of a type or device, else a description: a message must not fix a size."""
        asked = vars(self).get("attr")  # nor are values computed for a message
        named = asked in ("dtype", "device", "layout") or (asked is None and self.node.target == "type")
        return str(self.tracer.number(self)) if named else f"<{express(self.node)} of the traced graph>"

    def __copy__(self) -> Proxy:
        """A copy shares the memory, and passes no gradient."""
        detached = self.tracer.is_tensor(self)
        return self.tracer.create_proxy("call_method", "detach", (self,), {}) if detached else self

    def __deepcopy__(self, memo: dict[int, Any]) -> Proxy:
        detached = self.tracer.is_tensor(self)
        return self.__copy__().clone() if detached else self

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Proxy:
        asked = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, AnsweringProxy)]
        for leaf in asked:
            leaf.tracer.keep_symbolic(leaf, sys._getframe(1))
        if orig_method is F.multi_head_attention_forward and asked:
            tracer = asked[0].tracer
            plain = attend_by_function(
                lambda v: tracer.value(v.node) if isinstance(v, Proxy) else v, args, kwargs or {}
            )
            if plain is not None:
                return plain  # type: ignore[return-value]
        return super().__torch_function__(orig_method, types, args, kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy

        return numpy.asarray(self.tracer.number(self), *args)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        import numpy

        name = {"true_divide": "divide"}.get(function.__name__, function.__name__)
        if (
            name in _OF_NUMBERS
            and method == "__call__"
            and not kwargs
            and not any(isinstance(v, numpy.ndarray) for v in inputs)
        ):
            result = self.tracer.create_proxy("call_function", _OF_NUMBERS[name], inputs, {})
            return operator.mul(result, 1.0) if name in _FLOATS else result
        return _plain(getattr(function, method)(*self._numbers(inputs), **self._numbers(kwargs)))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function.__name__ == "prod" and len(args) == 1 and not kwargs:
            return self.tracer.create_proxy("call_function", _PRODUCT, args, {})
        return _plain(function(*self._numbers(args), **self._numbers(kwargs)))

    def _numbers(self, tree: Any) -> Any:
        return pytree.tree_map(lambda v: self.tracer.number(v) if isinstance(v, Proxy) else v, tree)


def _in_place(written: Callable[..., Any]) -> Callable[[AnsweringProxy, Any], Any]:
    return lambda self, other: self.tracer.in_place(written, self, other)


for _written in PLAIN:
    setattr(AnsweringProxy, f"__{_written.__name__}__", _in_place(_written))


@leaf_class
class ValueProxy(AnsweringProxy):
    """The proxy of a node."""


class ValueAttribute(AnsweringProxy, Attribute):
    """The proxy of a node's attribute, whose own node is made when it is needed."""

    def __getattr__(self, name: str) -> Any:
        if self.attr == "device" and name == "type":
            return self.tracer.value(self.node).type  # a string that contexts such as autocast want
        return super().__getattr__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.attr == "item" and not args and self.tracer.value(self.root.node).is_floating_point():
            return number_in(self.root)
        if self.attr in ("items", "keys", "values", "get") and isinstance(
            self.tracer.value(self.root.node), dict
        ):
            held: Any = self.root
            if self.attr == "get":
                return held[args[0]] if args[0] in held else (*args, None)[1]
            pairs = [(key, held[key]) for key in self.tracer.keys(self.root)]
            return pairs if self.attr == "items" else [pair[self.attr == "values"] for pair in pairs]
        if self.attr == "type":  # `x.type(torch.FloatTensor)`: the class by its name, as torch also takes it
            args = tuple(f"{a.__module__}.{a.__name__}" if _is_tensor_type(a) else a for a in args)
        return super().__call__(*args, **kwargs)


def number_in(tensor: Any) -> Proxy:
    """The number in a tensor of one element, for arithmetic with other tensors: as precise, without gradient.

    Nothing but arithmetic may ask for it: a branch or a size would depend on a tensor's values.
    """
    number: Proxy = tensor.detach().double().reshape(())
    return number


def is_given(node: fx.Node) -> bool:
    """Is it an input, or a part of one?"""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"


def _plain(value: Any) -> Any:
    import numpy

    return value.item() if isinstance(value, numpy.generic) else value


def _is_tensor_type(value: Any) -> bool:
    return isinstance(value, type(torch.FloatTensor)) and isinstance(value, type)
