"""From a model to its channel graph: traced as a whole or in parts, run at another size, and its channels tied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from smcp_fx.channels import ChannelGraph, build
from smcp_fx.channels.limits import limit_widths
from smcp_fx.config import PruningConfig
from smcp_fx.errors import InputError, TraceError
from smcp_fx.regions import Joined, find_regions, join_regions
from smcp_fx.tracing.call_forms import may_pin
from smcp_fx.tracing.other_sizes import at_another_size
from smcp_fx.tracing.tracer import Traced, trace


@dataclass(frozen=True)
class Analysis:
    """A model's graph and its channels; ``joined``: its parts, if it could not be traced as a whole."""

    traced: Traced
    channels: ChannelGraph
    joined: Joined | None = None


def analyse(
    model: nn.Module,
    inputs: tuple[Any, ...],
    leaves: Sequence[str] = (),
    config: PruningConfig | None = None,
) -> Analysis:
    """Trace a model and derive its channel graph. The graph shares the model's parameters.

    Calls that leave out optional arguments of the example are traced, too, unless fewer channels could go
    then. Raises as `prepare` does.
    """
    config = config or PruningConfig()

    def channels_of(traced: Traced) -> ChannelGraph:
        return build(
            traced.module,
            traced.values,
            multiple=config.multiple,
            exclude=config.exclude,
            keep_first_layer=config.keep_first_convolution,
            other=at_another_size(traced),
        )

    _check_leaves(model, leaves)
    traced, joined = _traced(model, inputs, tuple(leaves))
    channels = channels_of(traced)
    if traced.forms and may_pin(traced.module.graph):
        alone = trace(model, inputs, tuple(leaves))
        without = channels_of(alone)
        if int(without.free_units.sum()) > int(channels.free_units.sum()):
            traced, channels = alone, without
    limit_widths(channels, config.widths)
    return Analysis(traced, channels, joined)


def _traced(
    model: nn.Module, inputs: tuple[Any, ...], leaves: tuple[str, ...]
) -> tuple[Traced, Joined | None]:
    """The whole model's graph, or else that of the parts that can be traced."""
    try:
        return trace(model, inputs, leaves, options=True), None
    except TraceError as error:
        split = find_regions(model, inputs, leaves, str(error))
        if not split.regions:
            raise
        return join_regions(model, inputs, split)


def _check_leaves(model: nn.Module, leaves: Any) -> None:
    """Raise `InputError` unless ``leaves`` is a list of names of the model's modules."""
    if not isinstance(leaves, (list, tuple, set, frozenset)) or not all(
        isinstance(name, str) for name in leaves
    ):
        raise InputError(f"leaves must be a list of module names, not {leaves!r}")
    modules = dict(model.named_modules())
    for name in leaves:
        if name not in modules or not name:
            near = [path for path in modules if path and path.rpartition(".")[2] == name.rpartition(".")[2]]
            raise InputError(
                f"leaves: the model has no module {name!r}"
                + (f"; did you mean {', '.join(near[:4])}?" if near else "; model.named_modules() lists them")
            )
