"""Stand-ins, while a model is traced, for functions that would turn a proxy into a plain number and freeze a size.

`torch.zeros(x.shape[0], 3)` and `torch.finfo(x.dtype).min` become nodes. So do `int(h / 2)`, `float(h)` and
`len(x)` in the files of the model's own modules, and methods of constants that take no proxy, as in
`torch.ones(1).type(x.type())`. Calls without a proxy among their arguments just run.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.proxy import Proxy
from torch.fx.proxy import TraceError as FxTraceError
from torch.utils import _pytree as pytree

from smcp_fx.tracing.frames import in_library
from smcp_fx.tracing.proxies import number_in
from smcp_fx.tracing.random_draws import METHODS, drawing
from smcp_fx.tracing.sentences import asking_line, express

_FACTORIES = "zeros ones full empty arange linspace eye tensor as_tensor full_like meshgrid".split()
#: Methods of tensors that read their arguments before they check for proxies.
_METHODS = "type expand roll new new_empty new_full new_ones new_tensor new_zeros".split()
_TOLD = ("int", "float", "len", "isinstance", "callable", "type")
#: Functions of torch that raise unless a condition holds, and the place of the condition.
_CHECKS = {"_check": 0, "_check_with": 1, "_check_tensor_all": 0, "_check_tensor_all_with": 1}
#: Functions that only inspect a type, so that a stand-in serves as well.
_LOOKS = {"isinstance", "issubclass"}
_CACHED = functools._lru_cache_wrapper
_TRUNCATED = math.trunc  # taken here: while torch.fx traces, `math` holds other functions


class StandIns:
    """A context manager that puts the stand-ins in place, and restores everything at its end."""

    def __init__(self, tracer: Any, model: nn.Module) -> None:
        self.tracer = tracer
        self._put: list[tuple[Any, str, Any]] = []
        torch_wide = {
            **{name: self._factory(getattr(torch, name)) for name in _FACTORIES},
            **{name: self._limits(getattr(torch, name)) for name in ("finfo", "iinfo")},
            "is_tensor": self._is_tensor,
            "is_grad_enabled": self._is_grad_enabled(torch.is_grad_enabled),
            **{name: self._check(getattr(torch, name), place) for name, place in _CHECKS.items()},
        }
        self._wanted: list[tuple[Any, str, Any]] = [
            (torch, name, value) for name, value in torch_wide.items()
        ]
        self._wanted.append((torch.jit, "isinstance", self._of_kind(torch.jit.isinstance)))
        self._wanted += [(Tensor, name, self._method(name)) for name in _METHODS]
        recording: dict[str, Any] = {
            "int": self._type(int, self._int),
            "float": self._type(float, self._float),
            "len": self._len,
            "isinstance": self._isinstance,
            "callable": self._callable,
        }
        spaces = _spaces(model)
        for space in spaces:
            if isinstance(space, ModuleType):
                called = _called(space.__name__)
                numbers: tuple[type, ...] = (int, float)
                passing = {kind: recording[kind.__name__] for kind in numbers if kind.__name__ in called}
                recording["type"] = self._type_of(passing)
                self._wanted += [(space, name, recording[name]) for name in called if name not in vars(space)]
            self._wanted += _uncached_in(space)
        self._wanted += drawing(self._drawn, spaces)

    def __enter__(self) -> None:
        # dynamo keeps the functions that it finds when it is loaded: load it before there are stand-ins
        importlib.import_module("torch._dynamo")
        for space, name, value in self._wanted:
            before = space.cell_contents if isinstance(space, CellType) else vars(space).get(name, self)
            self._put.append((space, name, before))
            setattr(space, name, value)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._put:
            space, name, value = self._put.pop()
            if value is self:
                delattr(space, name)
            else:
                setattr(space, name, value)

    def _factory(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def factory(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
                return self.tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return factory

    def _method(self, name: str) -> Callable[..., Any]:
        function = getattr(Tensor, name)

        @functools.wraps(function)
        def method(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves((args, kwargs))):
                return self.tracer.create_proxy("call_method", name, args, kwargs)
            return function(*args, **kwargs)

        return method

    def _drawn(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if self.tracer.evaluating():  # a value is being computed: the tensor does not count
            return (target if callable(target) else METHODS[target])(*args, **kwargs)
        return self.tracer.create_proxy(kind, target, args, kwargs)

    def _isinstance(self, value: Any, kinds: Any) -> bool:
        if kinds is Proxy or not isinstance(value, Proxy):  # some code asks whether it is being traced
            return isinstance(value, kinds)
        return issubclass(self.tracer.kind(value), kinds)

    def _of_kind(self, function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, Proxy):
                return leaf
            return torch.empty(0) if self._is_tensor(leaf) else self.tracer.value(leaf.node)

        return lambda value, kind: function(pytree.tree_map(plain, value), kind)

    def _is_tensor(self, value: Any) -> bool:
        return issubclass(self.tracer.kind(value) if isinstance(value, Proxy) else type(value), Tensor)

    def _type_of(self, stand_ins: dict[type, type]) -> Callable[..., type]:
        """A `type` with which `type(n) is int` holds even if a stand-in replaces `int`."""

        def kind(*args: Any) -> Any:
            cls = self.tracer.kind(args[0]) if isinstance(args[0], Proxy) else type(*args)
            return stand_ins.get(cls, cls) if len(args) == 1 else cls

        return kind

    def _callable(self, value: Any) -> bool:
        return callable(self.tracer.value(value.node) if isinstance(value, Proxy) else value)

    def _check(self, function: Callable[..., None], place: int) -> Callable[..., None]:
        def check(*args: Any, **kwargs: Any) -> None:
            condition = args[place] if len(args) > place else kwargs.get("cond")
            if not isinstance(condition, Proxy):
                function(*args, **kwargs)
            elif self.tracer.is_tensor(condition):
                message = f"{express(condition.node)} has to hold ({asking_line()})"
                self.tracer.create_proxy("call_function", torch._assert, (condition.all(), message), {})
            elif not condition:
                raise FxTraceError(f"{express(condition.node)} has to hold, and does not")

        return check

    def _is_grad_enabled(self, function: Callable[[], bool]) -> Callable[[], bool]:
        thread = threading.get_ident()

        def enabled() -> bool:
            ours = threading.get_ident() == thread and not in_library(sys._getframe(1))
            return function() and (not ours or self.tracer.gradients.enabled(asking_line()))

        return enabled

    def _limits(self, kind: type) -> type:
        return self._type(kind, lambda p: self.tracer.create_proxy("call_function", kind, (p,), {}))

    def _int(self, proxy: Proxy) -> Any:
        value = self.tracer.value(proxy.node)
        if type(value) is float:
            return self.tracer.create_proxy("call_function", _TRUNCATED, (proxy,), {})
        return proxy if type(value) is int else int(proxy)  # type: ignore[call-overload]

    def _float(self, proxy: Proxy) -> Any:
        value = self.tracer.value(proxy.node)
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            return number_in(proxy)
        if type(value) is int:
            return self.tracer.create_proxy("call_function", operator.truediv, (proxy, 1), {})
        return proxy if type(value) is float else float(proxy)  # type: ignore[arg-type]

    def _len(self, value: Any) -> Any:
        if isinstance(value, Proxy) and isinstance(self.tracer.value(value.node), Tensor):
            return self.tracer.create_proxy("call_method", "size", (value, 0), {})
        return len(value)

    def _type(self, kind: type, record: Callable[[Proxy], Any]) -> type:
        """A stand-in for the type ``kind`` that records a call with a proxy."""
        tracer = self.tracer

        class StandIn(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                traced = len(args) == 1 and not kwargs and isinstance(args[0], Proxy)
                return record(args[0]) if traced else kind(*args, **kwargs)

            def __instancecheck__(cls, value: Any) -> bool:
                return issubclass(tracer.kind(value) if isinstance(value, Proxy) else type(value), kind)

            def __subclasscheck__(cls, other: type) -> bool:
                return issubclass(other, kind)

            def __getattr__(cls, name: str) -> Any:
                return getattr(kind, name)

        return StandIn(kind.__name__, (), {})


def _uncached(function: Any) -> Callable[..., Any]:
    """A function without its `functools.lru_cache`, which would keep traced values for other callers."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves((args, kwargs)))
        return (function.__wrapped__ if traced else function)(*args, **kwargs)

    return call


def _uncached_in(space: ModuleType | type) -> Iterator[tuple[Any, str, Any]]:
    """Replacements for cached functions: the holder, the name, the function. Decorators hold some in cells."""
    for name, value in list(vars(space).items()):
        method = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(method, _CACHED):
            yield space, name, _uncached(method) if value is method else type(value)(_uncached(method))
        for cell in (isinstance(method, FunctionType) and method.__closure__) or ():
            if isinstance(held := _content(cell), _CACHED):
                yield cell, "cell_contents", _uncached(held)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _spaces(model: nn.Module) -> list[ModuleType | type]:
    """The classes of the model's modules, their files, and the files of its package whose functions they import."""
    modules = list(model.modules())
    kinds = dict.fromkeys(map(type, modules))
    classes = [cls for kind in kinds for cls in kind.__mro__ if issubclass(cls, nn.Module)]
    held = (value for module in modules for value in vars(module).values())
    names = [cls.__module__ for cls in classes]
    names += [value.__module__ for value in held if isinstance(value, FunctionType)]
    spaces: dict[Any, None] = dict.fromkeys(cls for cls in classes if _is_models(cls.__module__))
    for name in filter(_is_models, dict.fromkeys(names)):
        spaces[sys.modules[name]] = None
        for value in list(vars(sys.modules[name]).values()):
            near = str(getattr(value, "__module__", "")).partition(".")[0] == name.partition(".")[0]
            if near and isinstance(value, (FunctionType, _CACHED)) and _is_models(value.__module__):
                spaces[sys.modules[value.__module__]] = None
    return list(spaces)


def _is_models(name: str) -> bool:
    return name in sys.modules and name.partition(".")[0] not in ("torch", "smcp_fx", "builtins")


@functools.cache
def _called(module: str) -> tuple[str, ...]:
    """The names among `int`, `float`, `len`, `isinstance` and `type` that a file only calls.

    (`dtype=int` needs the type itself; `callable` may be the name of something else in places.) A comparison with
    the result of `type` works if every `type` in the file is a call.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return ()
    called, looked, hints, compared = set[str](), set[int](), set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
            looked.add(id(node.func))
            for argument in node.args if node.func.id in _LOOKS else ():
                looked |= {id(part) for part in ast.walk(argument)}
        elif isinstance(node, ast.Compare) and any(map(_asks_type, (node.left, *node.comparators))):
            compared |= {id(part) for part in ast.walk(node)}
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            hints |= {id(part) for part in ast.walk(hint)} if isinstance(hint, ast.AST) else set()
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    if all(id(node) in looked for node in names if node.id == "type"):
        looked |= compared
    other = {node.id for node in names if id(node) not in looked | hints}
    return tuple(name for name in _TOLD if name in called and (name not in other or name == "callable"))


def _asks_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"
