"""The pass infrastructure: the contract is checked for any pass, also for one that breaks it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from models import chain
from torch import fx

from smcp_fx.errors import PassError
from smcp_fx.passes.base import GraphPass, PassResult, run_pipeline


class Recorded(GraphPass):
    """Returns what it is told to, and writes down what was called; raises where it is told to."""

    def __init__(self, result: Any = None, modified: bool = False, fails: str = "") -> None:
        self.result, self.modified, self.fails = result, modified, fails
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise PassError(f"{name} failed")

    def requires(self, module: fx.GraphModule) -> None:
        self._called("requires")

    def apply(self, module: fx.GraphModule) -> PassResult:
        self._called("apply")
        return PassResult(module, self.modified, ("note",)) if self.result is None else self.result

    def ensures(self, module: fx.GraphModule) -> None:
        self._called("ensures")


@pytest.fixture
def module() -> fx.GraphModule:
    return fx.symbolic_trace(chain(4, 4))


def test_requirements_then_the_pass_then_its_promises(module: fx.GraphModule) -> None:
    one = Recorded()
    result = one(module)
    assert one.calls == ["requires", "apply", "ensures"]
    assert result == PassResult(module, False, ("note",))


@pytest.mark.parametrize(("fails", "calls"), [("requires", 1), ("apply", 2), ("ensures", 3)])
def test_a_failing_condition_is_an_error(module: fx.GraphModule, fails: str, calls: int) -> None:
    one = Recorded(fails=fails)
    with pytest.raises(PassError, match=f"{fails} failed"):
        one(module)
    assert len(one.calls) == calls


@pytest.mark.parametrize("result", [True, (), "done"])
def test_a_wrong_return_type_is_an_error(module: fx.GraphModule, result: Any) -> None:
    with pytest.raises(PassError, match=f"Recorded returned {type(result).__name__}"):
        Recorded(result=result)(module)


def test_another_module_is_an_error(module: fx.GraphModule) -> None:
    other = fx.symbolic_trace(chain(4, 4))
    with pytest.raises(PassError, match="another module"):
        Recorded(result=PassResult(other, True))(module)


class Rewire(GraphPass):
    """Breaks the graph: a node that reads one defined after it."""

    def apply(self, module: fx.GraphModule) -> PassResult:
        nodes = list(module.graph.nodes)
        nodes[1].args = (nodes[2],)
        return PassResult(module, True)


def test_a_broken_graph_is_found(module: fx.GraphModule) -> None:
    with pytest.raises(RuntimeError, match="before it has been defined"):
        Rewire()(module)


class Negate(GraphPass):
    """Negates the output, in place."""

    def apply(self, module: fx.GraphModule) -> PassResult:
        output = next(node for node in module.graph.nodes if node.op == "output")
        with module.graph.inserting_before(output):
            output.args = (module.graph.call_function(torch.neg, output.args),)
        return PassResult(module, True)


def test_a_modified_module_is_recompiled(module: fx.GraphModule) -> None:
    image = torch.randn(1, 3, 8, 8)
    module.eval()
    expected = -module(image)
    Negate()(module)
    assert torch.equal(module(image), expected)


def test_a_pipeline_runs_in_order_on_one_module(module: fx.GraphModule) -> None:
    first, second = Recorded(), Recorded(modified=True)
    results = run_pipeline(module, [first, second])
    assert [result.modified for result in results] == [False, True]
    assert all(result.module is module for result in results)
    with pytest.raises(PassError):
        run_pipeline(module, [Recorded(fails="ensures"), never := Recorded()])
    assert never.calls == []


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (Recorded(fails="apply"), "in Recorded, after Negate: apply failed"),
        (Rewire(), "in Rewire, after Negate: RuntimeError: .*before it has been defined"),
    ],
)
def test_an_error_says_in_which_pass_and_after_which(
    module: fx.GraphModule, faulty: GraphPass, message: str
) -> None:
    with pytest.raises(PassError, match=message):
        run_pipeline(module, [Negate(), faulty])


def test_what_passes_report_is_logged(module: fx.GraphModule, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="smcp_fx.passes"):
        run_pipeline(module, [Recorded(modified=True), Recorded()])
    said = ["changed the graph", "note", "nothing to do", "note"]
    assert caplog.messages == [f"Recorded: {text}" for text in said]
