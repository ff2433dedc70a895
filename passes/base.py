"""The contract every graph pass keeps.

A pass takes a `GraphModule`, changes it in place, and returns a `PassResult`: the same module, whether anything was
modified, and a report of what was done or left alone, and why. Requirements are checked before it runs, guarantees on
its output. A second run modifies nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import fx

from smcp_fx.errors import PassError, SmcpError

_LOG = logging.getLogger("smcp_fx.passes")


@dataclass(frozen=True)
class PassResult:
    """The module (the one given), whether the pass changed it, and notes for the reader."""

    module: fx.GraphModule
    modified: bool
    report: tuple[str, ...] = ()


class GraphPass(ABC):
    """One transformation of a graph. Subclasses implement `apply`, and `requires`/`ensures` where needed."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return type(self).__name__

    def requires(self, module: fx.GraphModule) -> None:  # noqa: B027
        """Raise `PassError` if the input does not meet the pass's requirements."""

    @abstractmethod
    def apply(self, module: fx.GraphModule) -> PassResult:
        """Change the module; return what was done."""

    def ensures(self, module: fx.GraphModule) -> None:  # noqa: B027
        """Raise `PassError` if the output breaks the pass's guarantees."""

    def __call__(self, module: fx.GraphModule, recompile: bool = True) -> PassResult:
        """Check, apply, check; ``recompile``: regenerate the module's code if the graph has changed."""
        self.requires(module)
        result = self.apply(module)
        if not isinstance(result, PassResult):
            raise PassError(f"{self.name} returned {type(result).__name__}, not a PassResult")
        if result.module is not module:
            raise PassError(f"{self.name} works in place, yet returned another module")
        if result.modified:
            module.graph.lint()
            if recompile:
                module.recompile()
        self.ensures(result.module)
        return result


def run_pipeline(module: fx.GraphModule, passes: list[GraphPass]) -> list[PassResult]:
    """Run the passes in order on the module and return their results.

    Errors name their pass and those before it. Each pass's report is logged to `smcp_fx.passes` at DEBUG.
    """
    results: list[PassResult] = []
    for place, one in enumerate(passes):
        before = ", ".join(earlier.name for earlier in passes[:place])
        where = f"in {one.name}, after {before}" if before else f"in {one.name}"
        try:
            result = one(module, recompile=False)
        except Exception as error:
            said = error if isinstance(error, SmcpError) else f"{type(error).__name__}: {error}"
            raise PassError(f"{where}: {said}") from error
        _LOG.debug("%s: %s", one.name, "changed the graph" if result.modified else "nothing to do")
        for note in result.report:
            _LOG.debug("%s: %s", one.name, note)
        results.append(result)
    if any(result.modified for result in results):
        module.recompile()
    return results
