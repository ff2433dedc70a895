"""A tracer that lets Python ask about shapes: `if x.shape[-1] > 7`, `len(x.shape)`, `int(h)`, `for s in x.shape`.

Sizes stay nodes of the graph, so that batch and resolution stay free. Only where Python needs a value to go on
(a branch, a loop, an index) is the node's value worked out, on fake tensors of the example inputs' shapes, and
written down: the graph gets a `torch._assert` which says what was assumed, and fails with that sentence on an
input for which it does not hold. What depends on the values in a tensor is refused.

    before   if x.shape[-1] % 2: x = F.pad(x, (0, 1))
    after    getattr_1 = getattr(x, "shape"); getitem = getattr_1[-1]; mod = getitem % 2
             _assert = torch._assert(not_(mod), "traced for inputs where not x.shape[-1] % 2 ...")
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import Attribute, Proxy
from torch.fx.proxy import TraceError as FxTraceError
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from smcp_fx.trace_views import may_be_seen

_FACTORIES = (
    "zeros ones full empty arange linspace rand randn eye tensor as_tensor full_like meshgrid".split()
)
_INFIX = {
    operator.gt: ">", operator.ge: ">=", operator.lt: "<", operator.le: "<=", operator.eq: "==",
    operator.ne: "!=", operator.add: "+", operator.sub: "-", operator.mul: "*", operator.mod: "%",
    operator.floordiv: "//", operator.truediv: "/", operator.pow: "**", operator.and_: "&",
    operator.or_: "|",
}  # fmt: skip
#: What asks for a tensor's values, whatever kind of number it returns.
_READS = {"item", "tolist", "numpy", "equal", "allclose", "any", "all", "is_nonzero", "data_ptr"}


class _Answers(Proxy):
    """Python's questions, answered by the node's value on the example inputs."""

    tracer: ShapeTracer

    def __getattr__(self, name: str) -> Any:
        if name == "type" and getattr(self, "attr", None) == "device":
            return self.tracer.value(self.node).type  # a string that contexts such as autocast want
        return _ValueAttribute(self, name)

    def __int__(self) -> int:
        return int(self.tracer.number(self))

    def __index__(self) -> int:
        return operator.index(self.tracer.index(self, sys._getframe(1)))

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Proxy:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, _Answers):
                leaf.tracer.keep_symbolic(leaf, sys._getframe(1))
        return super().__torch_function__(orig_method, types, args, kwargs)

    def __float__(self) -> float:
        return float(self.tracer.number(self))

    def __len__(self) -> int:
        return self.tracer.length(self)

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.in_place(operator.iadd, operator.add, self, other)

    def __isub__(self, other: Any) -> Any:
        return self.tracer.in_place(operator.isub, operator.sub, self, other)

    def __imul__(self, other: Any) -> Any:
        return self.tracer.in_place(operator.imul, operator.mul, self, other)

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.in_place(operator.itruediv, operator.truediv, self, other)

    def __round__(self, digits: int | None = None) -> Proxy:
        arguments = (self,) if digits is None else (self, digits)
        return self.tracer.create_proxy("call_function", round, arguments, {})


class ValueProxy(_Answers):
    """The proxy of a node."""


class _ValueAttribute(_Answers, Attribute):
    """The proxy of a node's attribute, whose own node is made when it is needed."""


class ShapeTracer(fx.Tracer):
    """The standard tracer for one model and its example inputs; ``assumptions`` lists what was taken for given."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs
        self.assumptions: list[str] = []
        self._known: set[str] = set()
        self._asked: dict[tuple[fx.Node, CodeType, int], tuple[str, fx.Node]] = {}
        self._values: dict[fx.Node, Any] = {}
        self._order: dict[fx.Node, int] = {}
        self._evaluating = False
        self._fake: Any = None

    # ---- what fx asks of a tracer -----------------------------------------------------------------------

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace, with torch's factories of tensors taking sizes that are proxies."""
        with _SymbolicFactories(self):
            graph = super().trace(root, concrete_args)
        _drop_constant_questions(graph)
        return graph

    def proxy(self, node: fx.Node) -> Proxy:
        """Every node's proxy knows how to answer."""
        return ValueProxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Nodes are numbered as they are made."""
        node = super().create_node(*args, **kwargs)
        self._order[node] = len(self._order)
        return node

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Arguments that the example leaves out have their defaults, and are no inputs of the graph."""
        function, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        for index, argument in enumerate(arguments[1:], start=1):
            if index <= len(self.inputs) or not isinstance(argument, Proxy):
                continue
            node = argument.node
            if node.op == "placeholder" and node.args and not str(node.target).startswith("*"):
                arguments[index] = node.args[0]
                self.graph.erase_node(node)
        return function, arguments

    def call_module(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Modules called while a value is worked out just run."""
        return forward(*args, **kwargs) if self._evaluating else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """So do they read their parameters."""
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: Proxy) -> bool:
        """The branch taken."""
        value = bool(self._plain(obj, "a branch"))
        self._assume(obj, obj if value else obj.tracer.create_proxy("call_function", operator.not_, (obj,), {}),
                     _express(obj.node) if value else f"not {_express(obj.node)}")  # fmt: skip
        return value

    def iter(self, obj: Proxy) -> Iterator[Any]:
        """The parts, as many as there are in the example."""
        return iter([obj[index] for index in range(self.length(obj))])  # type: ignore[index]

    def keys(self, obj: Proxy) -> Any:
        """The keys of a dict, as they are in the example."""
        value = self.value(obj.node)
        return list(value) if isinstance(value, dict) else super().keys(obj)

    def in_place(self, written: Callable[..., Any], plain: Callable[..., Any], obj: Proxy, other: Any) -> Any:
        """`x += y`: it writes into inputs and views, which others see; a tensor of its own gets another name."""
        kept = may_be_seen(obj.node) and isinstance(self.value(obj.node), Tensor)
        return self.create_proxy("call_function", written if kept else plain, (obj, other), {})

    # ---- values -----------------------------------------------------------------------------------------

    def number(self, obj: Proxy) -> Any:
        """The number a proxy stands for; what follows from it is fixed in the graph."""
        value = self._plain(obj, "a number")
        equal = self.create_proxy("call_function", operator.eq, (obj, value), {})
        self._assume(obj, equal, f"{_express(obj.node)} == {value}")
        return value

    def index(self, obj: Proxy, asker: FrameType) -> Any:
        """The number, asked for by ``__index__``; whoever asks may still take the proxy itself."""
        known = len(self.assumptions)
        value = self.number(obj)
        if len(self.assumptions) > known:
            asserted = next(iter(reversed(self.graph.nodes)))
            self._asked[obj.node, asker.f_code, asker.f_lasti] = self.assumptions[-1], asserted
        return value

    def keep_symbolic(self, obj: Proxy, caller: FrameType) -> None:
        """Take back an assumption that a function of torch made by looking whether its argument is a number.

        Its parser asks for the index, and then the call is recorded with the proxy, by the same instruction.
        """
        asked = self._asked.pop((obj.node, caller.f_code, caller.f_lasti), None)
        if asked is None:
            return
        message, asserted = asked
        condition = asserted.args[0]
        self.assumptions.remove(message)
        self._known = {sentence for sentence in self._known if f" where {sentence} (" not in message}
        self.graph.erase_node(asserted)
        if isinstance(condition, fx.Node) and not condition.users:
            self.graph.erase_node(condition)

    def length(self, obj: Proxy) -> int:
        """How many parts a tensor, tuple or list has."""
        value = self.value(obj.node)
        count = len(value)
        if isinstance(value, Tensor):
            size = self.create_proxy("call_method", "size", (obj, 0), {})
        else:
            return count  # the structure of the graph's own values follows from what made them
        equal = self.create_proxy("call_function", operator.eq, (size, count), {})
        self._assume(obj, equal, f"len({_express(obj.node)}) == {count}")
        return count

    def value(self, node: fx.Node) -> Any:
        """The value of a node on (fake tensors like) the example inputs."""
        wanted, stack = {node}, [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source not in self._values and source not in wanted:
                    wanted.add(source)
                    stack.append(source)
        self._evaluating = True
        try:
            with self._fake_mode(), torch.no_grad():
                for each in sorted(wanted - self._values.keys(), key=self._order.__getitem__):
                    self._values[each] = self._evaluate(each)
        finally:
            self._evaluating = False
        return self._values[node]

    def _plain(self, obj: Proxy, what: str) -> Any:
        value = self.value(obj.node)
        if isinstance(value, Tensor):
            raise FxTraceError(f"{what} depends on the values in a tensor ({_express(obj.node)})")
        return value

    def _evaluate(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            place = [n for n in self.graph.nodes if n.op == "placeholder"].index(node)
            value = self.inputs[place] if place < len(self.inputs) else node.args[0]
            return pytree.tree_map(self._faked, value)
        if node.op == "get_attr":
            value = self.root
            for name in str(node.target).split("."):
                value = getattr(value, name)
            return pytree.tree_map(self._faked, value)
        args, kwargs = plain_lists(fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__))
        try:
            if node.op == "call_module":
                module = self.root.get_submodule(str(node.target))
                if isinstance(module, _BatchNorm) and len(args) == 1 and isinstance(args[0], Tensor):
                    return torch.empty_like(args[0])  # a fake one is decomposed, which is slow
                return module(*args, **kwargs)
            if node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            raise FxTraceError(f"{_express(node)} cannot be told from shapes alone ({error})") from error
        if str(getattr(node.target, "__name__", node.target)) in _READS and isinstance(args[0], Tensor):
            raise FxTraceError(f"{_express(node)} depends on the values in a tensor")
        return result

    def _fake_mode(self) -> Any:
        if self._fake is None:
            from torch._subclasses.fake_tensor import FakeTensorMode  # half a second to import

            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        return self._fake

    def _faked(self, value: Any) -> Any:
        return self._fake.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value

    def _assume(self, obj: Proxy, condition: Proxy, sentence: str) -> None:
        if sentence in self._known:
            return
        self._known.add(sentence)
        message = f"traced for inputs where {sentence} ({_place()})"
        self.assumptions.append(message)
        advice = f"{message}; prepare the model again with an example input like this one"
        self.create_proxy("call_function", torch._assert, (condition, advice), {})


def plain_lists(tree: Any) -> Any:
    """The arguments of a node with lists and dicts that can be written into; fx's own refuse it."""
    # Named tuples, and what `torch.max` returns, stay what they are.
    if isinstance(tree, list) or type(tree) is tuple:
        return [*map(plain_lists, tree)] if isinstance(tree, list) else tuple(map(plain_lists, tree))
    if isinstance(tree, dict):
        return {key: plain_lists(value) for key, value in tree.items()}
    return tree


class _SymbolicFactories:
    """While tracing, `torch.zeros(x.shape[0], 3)` becomes a node; without a proxy among them, it just runs."""

    def __init__(self, tracer: ShapeTracer) -> None:
        self.tracer = tracer
        self.originals = {name: getattr(torch, name) for name in _FACTORIES}

    def __enter__(self) -> None:
        for name, function in self.originals.items():
            setattr(torch, name, self._wrapped(function))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, function in self.originals.items():
            setattr(torch, name, function)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def factory(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
                return self.tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return factory


def _drop_constant_questions(graph: fx.Graph) -> None:
    """Comparisons that were made for Python's sake and that no assertion needs."""
    for node in reversed(list(graph.nodes)):
        asked = node.op == "call_function" and (
            node.target in _INFIX or node.target in (operator.not_, getattr)
        )
        if asked and not node.users:
            graph.erase_node(node)


def _express(node: Any, depth: int = 0) -> str:
    """How a reader would write what a node computes, back to the tensors it asks about."""
    if isinstance(node, slice):
        start, stop = ("" if edge is None else _express(edge, depth) for edge in (node.start, node.stop))
        return f"{start}:{stop}"
    if not isinstance(node, fx.Node):
        return repr(node)
    if depth > 12:
        return node.name
    parts = [_express(arg, depth + 1) for arg in node.args]
    if node.op == "call_function":
        if node.target is getattr:
            return f"{parts[0]}.{node.args[1]}"
        if node.target is operator.getitem:
            return f"{parts[0]}[{parts[1]}]"
        if node.target in _INFIX and len(parts) == 2:
            text = f"{parts[0]} {_INFIX[node.target]} {parts[1]}"
            return text if depth == 0 else f"({text})"
        if node.target is round or getattr(node.target, "__module__", "") == "math":
            return f"{node.target.__name__}({', '.join(parts)})"  # type: ignore[union-attr]
    if node.op == "call_method" and node.target in ("size", "dim", "numel"):
        return f"{parts[0]}.{node.target}({', '.join(parts[1:])})"
    return node.name


def _place() -> str:
    """The line of the model's code that asked."""
    here = Path(__file__)
    for frame in reversed(traceback.extract_stack()):
        if "torch/fx" not in frame.filename and Path(frame.filename) != here:
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return "unknown place"
