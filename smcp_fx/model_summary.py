"""The summary of a prepared model: its layers and groups, and their costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.trail import Layer
from smcp_fx.cost_model import NetworkCost
from smcp_fx.texts import amount, short, table


def share_of(cost: NetworkCost, counts: Mapping[str, int]) -> str:
    """Return e.g. "1.82 G of 4.09 G multiply-adds (44.5%)": the cost at these counts, of the full cost."""
    full, now = cost.cost(cost.full_counts), cost.cost(counts)
    number = amount(now, cost.unit).split(" ")
    return f"{' '.join(number[:-1])} of {amount(full, cost.unit)} ({now / full if full else 1.0:.1%})"


def kept_widths(channels: ChannelGraph, keep: Tensor) -> Iterator[tuple[Layer, int, int]]:
    """Each layer in the order they run, with its numbers of kept input and output channels."""

    def kept(labels: Tensor) -> int:
        units = channels.units.of(labels)
        return int(((units < 0) | keep[units.clamp(min=0)]).sum())

    for layer in channels.layers:
        yield layer, kept(layer.input_channels), kept(layer.output_channels)


def model_summary(
    channels: ChannelGraph,
    keep: Tensor,
    flops: NetworkCost,
    parameters: NetworkCost,
    counts: Mapping[str, int],
) -> str:
    """Return tables of the layers and the groups: their kept channels, parameters and multiply-adds."""
    adds, weights = flops.by_name(counts), _by_module(parameters.by_name(counts))
    rows: list[tuple[str, ...]] = []
    for layer, inputs, outputs in {widths[0].path: widths for widths in kept_widths(channels, keep)}.values():
        full = layer.input_channels.numel(), layer.output_channels.numel()
        costs = weights.pop(layer.path, 0.0), adds.pop(layer.path, 0.0)
        rows.append((layer.path, f"{inputs} of {full[0]}", f"{outputs} of {full[1]}", *map(short, costs)))
    rest = sum(weights.values()) + parameters.rest, sum(adds.values()) + flops.rest
    rows.append(("everything else", "", "", *map(short, rest)))
    rows.append(("all", "", "", *(short(cost.cost(counts)) for cost in (parameters, flops))))
    groups: list[tuple[str, ...]] = []
    for group in channels.groups:
        if group.free:
            touched = (_touched(cost, group.name, counts) for cost in (parameters, flops))
            limits = ", ".join(group.limits)
            groups.append((group.name, f"{counts[group.name]} of {group.size}", *touched, limits))
    return "\n\n".join(
        (
            table(("layer", "inputs kept", "outputs kept", "parameters", "multiply-adds"), rows),
            table(
                ("free group", "units kept", "parameters with a part in it", "multiply-adds", "limits"),
                groups,
            ),
        )
    )


def _by_module(parameters: Mapping[str, float]) -> dict[str, float]:
    counts: dict[str, float] = {}
    for name, count in parameters.items():
        module = name.rpartition(".")[0]
        counts[module] = counts.get(module, 0.0) + count
    return counts


def _touched(cost: NetworkCost, group: str, counts: Mapping[str, int]) -> str:
    return short(sum(term.cost(counts) for term in cost.terms if group in term.groups))
