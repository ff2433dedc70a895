"""The graph module that `convert` and `load` return; any process can unpickle it correctly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx, nn
from torch.fx.graph_module import _CodeOnlyModule

from smcp_fx.interface.as_traced import CalledAsTraced
from smcp_fx.interface.carried import without_answers
from smcp_fx.tracing.block_hooks import CalledWithHooks
from smcp_fx.tracing.graph_pickle import listed, rebuilt
from smcp_fx.tracing.names import holds_unfit_names
from smcp_fx.tracing.values import NO_AUTOCAST

#: Attributes of a graph module beyond those of every module: its code and graph.
_OF_THE_GRAPH = vars(fx.GraphModule(nn.Module(), fx.Graph())).keys() - vars(nn.Module()).keys()


class ConvertedModule(CalledWithHooks, CalledAsTraced, fx.GraphModule):
    """A `GraphModule` that pickles as a plain one, without this library, if that gives the same graph.

    `torch.fx` pickles a graph as code and traces that code again on loading. Tracing freezes attributes that
    the code reads from a module (`self.head.training`), and fails where the code tests values (`not flag`). A
    graph that would come back changed is pickled node by node; loading it needs this library.
    """

    if TYPE_CHECKING:  # TorchScript reads a class's annotations
        kept: dict[str, tuple[list[int], list[int]]]

    def widths(self) -> dict[str, tuple[int, int]]:
        """Return the number of input and output channels of each module of ``kept``."""
        return {path: (len(ins), len(outs)) for path, (ins, outs) in self.kept.items()}

    def __reduce__(self) -> Any:
        """Pickle; `CheckpointError` for a graph that calls a function that no module holds by name."""
        self._tracer_cls = None  # the default tracer, whose constructor needs no arguments
        self._graphmodule_cls_name = type(self).__name__
        self.__dict__.pop("_tracer_extras", None)
        if retraces_the_same(self):
            made, (state, *code) = super().__reduce__()
            return made, (without_answers(state), *code)
        name = type(self).__name__
        state = {key: value for key, value in vars(self).items() if key not in _OF_THE_GRAPH}
        return _unpickled, (name, listed(self.graph, name)), state


def _unpickled(name: str, nodes: list[tuple[Any, ...]]) -> ConvertedModule:
    """Return a module with the graph alone; pickle adds the modules."""
    module = ConvertedModule(nn.Module(), fx.Graph(), class_name=name)
    module.graph = rebuilt(nodes)
    return module


def retraces_the_same(module: fx.GraphModule) -> bool:
    """Whether tracing the generated code again, as unpickling does, gives the same operations in order."""

    class CodeOnly(_CodeOnlyModule):
        forward = type(module).forward

    code_only = CodeOnly({name: value for name, value in vars(module).items() if name != "_graph"})

    class KeepModules(fx.Tracer):
        def is_leaf_module(self, m: Any, module_qualified_name: str) -> bool:
            return True

    if holds_unfit_names(module.graph):  # torch.fx would write these names into its code
        return False
    if any(NO_AUTOCAST in node.meta for node in module.graph.nodes):  # tracing would drop the mark
        return False
    try:
        traced = KeepModules().trace(code_only)
        again = fx.GraphModule(code_only, traced)
    except Exception:  # functions run on proxies may raise anything: tracing fails
        return False
    # The constructor rebuilds the containers: buffers outside the state dict and modes may change.
    modes, modes_again = (
        {name: part.training for name, part in one.named_modules() if name} for one in (module, again)
    )
    return (
        modes == modes_again
        and list(module.state_dict()) == list(again.state_dict())
        and _operations(module.graph) == _operations(traced)
        and all(
            node.name != "self" for node in traced.nodes
        )  # a module's name, which the code means itself by
    )


def _operations(graph: fx.Graph) -> list[Any]:
    place = {node: index for index, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", place[value])
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return [(key, plain(item)) for key, item in value.items()]
        if isinstance(value, slice):
            return ("slice", plain(value.start), plain(value.stop), plain(value.step))
        return repr(value)

    return [
        (node.op, _called(node.target), plain(node.args), plain(dict(node.kwargs))) for node in graph.nodes
    ]


def _called(target: Any) -> Any:
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))
