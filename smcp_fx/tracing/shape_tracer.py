"""A tracer that lets Python ask about shapes: `if x.shape[-1] > 7`, `len(x.shape)`, `int(h)`, `for s in x.shape`.

Sizes stay nodes of the graph, so that batch and resolution stay free. If Python needs a value (a branch, a
loop, an index), the tracer computes it on fake tensors of the example inputs' shapes. It then adds a
`torch._assert` to the graph, which states the assumption and fails on inputs that break it. The tracer
refuses a number that depends on a tensor's values.

    before   if x.shape[-1] % 2: x = F.pad(x, (0, 1))
    after    getattr_1 = getattr(x, "shape"); getitem = getattr_1[-1]; mod = getitem % 2
             _assert = torch._assert(not_(mod), "traced for inputs where not x.shape[-1] % 2 ...")
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Proxy
from torch.fx.proxy import TraceError as FxTraceError
from torch.utils import _pytree as pytree

from smcp_fx.tracing.attributes import Assignments, Attributes, held_tensors, refuse_state
from smcp_fx.tracing.call_forms import has_name, is_option
from smcp_fx.tracing.gradients import GradientQuestions, checkpoints_called
from smcp_fx.tracing.in_place import PLAIN, drop_releases, is_tensor_for_sure, settle_in_place
from smcp_fx.tracing.known_results import of_fake_tensors
from smcp_fx.tracing.lengths import FixedSizes, write_out_kernels
from smcp_fx.tracing.mode_reads import ModeLog, drop_marks
from smcp_fx.tracing.operations import result_of
from smcp_fx.tracing.parameter_writes import settle_parameter_writes
from smcp_fx.tracing.proxies import ValueProxy, is_given
from smcp_fx.tracing.python_builtins import StandIns
from smcp_fx.tracing.questions import asks_if_finite, drop_constant_questions, reads_values
from smcp_fx.tracing.rewrites import by_position
from smcp_fx.tracing.seen_through import seen_through
from smcp_fx.tracing.sentences import AGAIN, TAKEN, asking_line, express
from smcp_fx.tracing.values import LINE, plain_lists
from smcp_fx.tracing.writes import functional_writes, own_constants


class KeptOutsideError(FxTraceError):
    """A fake tensor that a hook or list kept from an evaluation was about to become a constant."""


class ShapeTracer(fx.Tracer):
    """The standard tracer for one model and its inputs; ``assumptions``: those it made about the inputs."""

    def __init__(self, inputs: tuple[Any, ...], fixed: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.inputs = inputs
        self.fixed = fixed  # the places of inputs that are fixed to their example values
        self.gradients = GradientQuestions()
        self.assumptions: list[str] = []
        self.log = ModeLog()
        self._known: set[str] = set()
        self._asked: dict[tuple[fx.Node, CodeType, int], tuple[str, fx.Node]] = {}
        self._values: dict[fx.Node, Any] = {}
        self._order: dict[fx.Node, int] = {}
        self._evaluating = False
        self._fake: Any = None
        self._held: dict[str, Tensor] = {}

    # ---- what fx asks of a tracer -----------------------------------------------------------------------

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace while torch's tensor factories and Python's number types accept proxies."""
        model = root if isinstance(root, nn.Module) else nn.Module()
        before = Attributes(model)
        graph = self._traced(root, model, concrete_args)
        if self.gradients.asked and not self.gradients.answer:
            after = Attributes(model)
            before.restore(constants=False)
            other = copy.copy(self)
            ShapeTracer.__init__(other, self.inputs, self.fixed)
            other.gradients = GradientQuestions(answer=True)
            kept = other.trace(root, concrete_args)
            self.gradients.compare((graph, self._constants()), (kept, other._constants()))
            after.restore(constants=False)
        return graph

    def _traced(self, root: Any, model: nn.Module, concrete_args: dict[str, Any] | None) -> fx.Graph:
        self._held = dict(held_tensors(model))
        self._sizes = FixedSizes(model, self.value)
        with (
            torch.enable_grad(),  # an earlier trace's forward may have switched it off
            seen_through(),
            StandIns(self, model),
            Assignments(self, self._held, self.log.assigned) as assignments,
            checkpoints_called(),
        ):
            graph = super().trace(root, concrete_args)
        self.log.closed = True
        assignments.finish(graph)
        by_position(model, graph)
        drop_marks(graph)
        own_constants(graph, model, self._constants().keys() - self._held.keys(), self._adopt)
        drop_releases(graph)
        settle_parameter_writes(graph, model, self._adopt)
        settle_in_place(graph, model, self.value)
        functional_writes(graph, model, self.value, self._adopt, self.assumptions)
        drop_constant_questions(graph)
        write_out_kernels(graph, self._sizes)
        return graph

    def _constants(self) -> dict[str, Tensor]:
        return {name: value for value, name in self.tensor_attrs.items() if isinstance(value, Tensor)}

    def proxy(self, node: fx.Node) -> Proxy:
        """Make a proxy that answers Python's questions."""
        return ValueProxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Number each new node."""
        node = super().create_node(*args, **kwargs)
        self._order[node] = len(self._order)
        self.log.note(node)
        if not self.log.closed and (line := asking_line("")):
            node.meta[LINE] = line
        return node

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Give arguments that the example leaves out their defaults; they are no inputs of the graph."""
        if is_module and inspect.unwrap(root_fn) is not root_fn:
            return root_fn, self._arguments_of_decorated(root_fn)
        function, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        own = inspect.signature(root_fn).parameters
        for index, argument in enumerate(arguments[1:], start=1):
            if not isinstance(argument, Proxy):
                continue
            if index - 1 in self.fixed:
                arguments[index] = self.inputs[index - 1]
                continue
            if index <= len(self.inputs):
                arguments[index] = self.known(argument, self.inputs[index - 1])
                continue
            name = str(argument.node.target)
            if name.startswith("*") or own[name].default is not inspect.Parameter.empty:
                arguments[index] = {} if name[1:2] == "*" else () if name[0] == "*" else own[name].default
                self.graph.erase_node(argument.node)
        return function, arguments

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Proxy:
        """Keep an argument's default only if code can name it; drop tensors and other objects."""
        if kind == "placeholder" and not all(map(has_name, pytree.tree_leaves(args))):
            args = ()
        return super().create_proxy(kind, target, args, kwargs, *rest, **named)

    def known(self, obj: Proxy, value: Any) -> Any:
        """The proxy of an input or its part; an option's own value, as `x is None` would see the proxy."""
        if not is_option(value):
            return obj
        compared = operator.is_ if value is None else operator.eq
        same = self.create_proxy("call_function", compared, (obj, value), {})
        self._assume(obj, same, f"{express(obj.node)} is {value}")
        return value

    def _arguments_of_decorated(self, root_fn: Any) -> list[Any]:
        """The model and its inputs. (torch.fx would analyse the function inside the decorated one.)"""
        parameters = [*inspect.signature(root_fn).parameters.values()][1 : len(self.inputs) + 1]
        proxies: list[Any] = [
            self.create_proxy("placeholder", p.name, () if p.default is p.empty else (p.default,), {})
            for p in parameters
        ]
        return [
            self.root,
            *(
                given if place in self.fixed else self.known(proxy, given)
                for place, (proxy, given) in enumerate(zip(proxies, self.inputs, strict=True))
            ),
        ]

    def create_arg(self, a: Any) -> Any:
        """Turn numpy's numbers into plain ones; refuse the tracer's fake tensors, which are no constants."""
        if isinstance(a, Proxy):  # most arguments; torch.fx asks first whether it is a parameter or a module
            return a.node
        if isinstance(a, Tensor) and self._fake is not None and getattr(a, "fake_mode", None) is self._fake:
            raise KeptOutsideError(
                "a tensor comes from a hook, or from a list outside the model, which keeps what modules give"
            )
        return super().create_arg(
            a.item() if type(a).__module__ == "numpy" and getattr(a, "ndim", 1) == 0 else a
        )

    def call_module(self, m: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Modules called while a value is computed just run; modules outside the model are traced through."""
        if self._evaluating:
            return forward(*args, **kwargs)
        if isinstance(m, nn.Module) and self.submodule_paths and m not in self.submodule_paths:
            refuse_state(m, self.submodule_paths)
            return forward(*args, **kwargs)

        def in_frame(*args: Any, **named: Any) -> Any:
            with self.log.frame(self.submodule_paths[m] if self.submodule_paths else "") as frame:
                output = forward(*args, **named)
            return self.log.mark(frame, output, self)

        return super().call_module(m, in_frame, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """While a value is computed, parameters are read as they are."""
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: Proxy) -> bool:
        """Take the example's branch; to the question whether all values are finite, answer yes."""
        if (asked := asks_if_finite(obj.node)) is not None:
            tensor, finite = asked
            good = obj if finite else obj.tracer.create_proxy("call_function", operator.not_, (obj,), {})
            self._assume(obj, good, f"{express(tensor)} is finite")
            return finite
        value = bool(self._plain(obj, "a branch"))
        if obj.node.target in (operator.eq, operator.ne) and None in obj.node.args:
            return value  # holds for every input
        self._assume(obj, obj if value else obj.tracer.create_proxy("call_function", operator.not_, (obj,), {}),
                     express(obj.node) if value else f"not {express(obj.node)}")  # fmt: skip
        return value

    def iter(self, obj: Proxy) -> Iterator[Any]:
        """Iterate over as many parts as the example has, or over the keys of a dict."""
        if isinstance(self.value(obj.node), dict):
            return iter(self.keys(obj))
        return iter([obj[index] for index in range(self.length(obj))])  # type: ignore[index]

    def keys(self, obj: Proxy) -> Any:
        """The keys of a dict, as they are in the example."""
        value = self.value(obj.node)
        if not isinstance(value, dict):
            return super().keys(obj)
        self.length(obj)
        return [key for key in value if key in obj]

    def evaluating(self) -> bool:
        """Whether a value is being computed (and no graph is being recorded)."""
        return self._evaluating

    def in_place(self, written: Callable[..., Any], obj: Proxy, other: Any) -> Any:
        """Record `x += y`: a write into a tensor (until `settle_in_place`), or a number's new value."""
        tensor = is_tensor_for_sure(obj.node) or isinstance(self.value(obj.node), Tensor)
        return self.create_proxy("call_function", written if tensor else PLAIN[written], (obj, other), {})

    # ---- values -----------------------------------------------------------------------------------------

    def number(self, obj: Proxy) -> Any:
        """The number behind a proxy; everything computed from it is fixed in the graph."""
        value = self._plain(obj, "a number")
        equal = self.create_proxy("call_function", operator.eq, (obj, value), {})
        self._assume(obj, equal, f"{express(obj.node)} == {value}")
        return value

    def index(self, obj: Proxy, asker: FrameType) -> Any:
        """The number for ``__index__``; the caller may still use the proxy itself."""
        before = len(self.assumptions)
        value = self.number(obj)
        if len(self.assumptions) > before:
            asserted = next(iter(reversed(self.graph.nodes)))
            self._asked[obj.node, asker.f_code, asker.f_lasti] = self.assumptions[-1], asserted
        return value

    def keep_symbolic(self, obj: Proxy, caller: FrameType) -> None:
        """Withdraw an assumption that arose only because a torch function checked its argument for a number.

        The function's parser calls ``__index__``; the same instruction then records the call with the proxy.
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
        """Return the length of a tensor, tuple or list."""
        value = self.value(obj.node)
        count = len(value)
        if isinstance(value, Tensor):
            size = self.create_proxy("call_method", "size", (obj, 0), {})
        elif is_given(obj.node):
            size = self.create_proxy("call_function", len, (obj,), {})
        elif self._sizes.may_vary(obj.node):
            size = self._sizes.number_of_parts(obj.node, self.proxy)
        else:
            return count  # the structure of the graph's own values follows from the operations
        equal = self.create_proxy("call_function", operator.eq, (size, count), {})
        self._assume(obj, equal, f"len({express(obj.node)}) == {count}")
        return count

    def _adopt(self, node: fx.Node) -> None:
        """Register a node that was added to the graph later, with its value."""
        self._order[node] = len(self._order)
        self.value(node)

    def check_parts(self, obj: Proxy) -> None:
        """Assume that a split gives, or an input has, as many parts as the code unpacks."""
        made = obj.node.op in ("call_function", "call_method")
        if is_given(obj.node) or (made and self._sizes.may_vary(obj.node)):
            self.length(obj)

    def value(self, node: fx.Node) -> Any:
        """The node's value for the example inputs, computed on fake tensors."""
        if node in self._values:
            return self._values[node]
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

    def held_or_value(self, node: fx.Node) -> Any:
        """The model's own tensor that a node reads; else the node's value."""
        held = self._held.get(str(node.target)) if node.op == "get_attr" else None
        return self.value(node) if held is None else held

    def kind(self, obj: Proxy) -> type:
        """Return the type of the value behind a proxy."""
        value = self.value(obj.node)
        if isinstance(value, Tensor):
            return nn.Parameter if isinstance(self._held.get(str(obj.node.target)), nn.Parameter) else Tensor
        return type(value)

    def is_tensor(self, obj: Proxy) -> bool:
        """Is the proxy's value a tensor, or a number that depends on a tensor's values?"""
        try:
            return isinstance(self.value(obj.node), Tensor)
        except FxTraceError:
            return True

    def _plain(self, obj: Proxy, use: str) -> Any:
        value = self.value(obj.node)
        if isinstance(value, Tensor):
            raise FxTraceError(f"{use} depends on the values in a tensor ({express(obj.node)})")
        return value

    def _evaluate(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            place = [n for n in self.graph.nodes if n.op == "placeholder"].index(node)
            example = self.inputs[place] if place < len(self.inputs) else node.args[0]
            return pytree.tree_map(self._faked, example)
        if node.op == "get_attr":
            name = str(node.target)
            if name in self._held:  # the original: forward may have replaced it by a proxy
                return self._faked(self._held[name])
            value: Any = self.root
            for part in name.split("."):
                value = getattr(value, part)
            return pytree.tree_map(self._faked, value)
        if self.gradients.asks(node):
            return self.gradients.answered(node, asking_line())
        args, kwargs = plain_lists(fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__))
        module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if (made := of_fake_tensors(node, module, args, kwargs)) is not None:
            return made
        try:
            if module is not None:
                return self.run_module(module, args, kwargs)
            result = result_of(node, None, args, kwargs)
        except Exception as error:
            raise FxTraceError(f"{express(node)} cannot be told from shapes alone ({error})") from error
        if reads_values(node) and isinstance(args[0], Tensor):
            raise FxTraceError(f"{express(node)} depends on the values in a tensor")
        return result

    def run_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The module's result for fake tensors."""
        return module(*args, **kwargs)

    def _fake_mode(self) -> Any:
        if self._fake is None:
            from torch._subclasses.fake_tensor import FakeTensorMode  # half a second to import

            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        return self._fake

    def _faked(self, value: Any) -> Any:
        return self._fake.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value

    def _assume(self, obj: Proxy, condition: Proxy, sentence: str) -> None:
        if sentence in self._known or self.gradients.tell(obj.node):
            return
        self._known.add(sentence)
        message = f"{TAKEN}{sentence} ({asking_line()})"
        self.assumptions.append(message)
        self.create_proxy("call_function", torch._assert, (condition, message + AGAIN), {})
