"""The channel graph as text: a tree of groups by module path, and single groups, modules and channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Group as Lines
from rich.text import Text
from rich.tree import Tree

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.groups import Group
from smcp_fx.channels.trail import Layer
from smcp_fx.errors import InputError
from smcp_fx.inspection.description import Inspection, groups_of, pinned_summary, unique_layers

#: The overview shows the deepest level with at most this many lines.
READABLE_LINES = 60
_MOST = 6  # names in a list


@dataclass
class _Module:
    """A module, and the groups that its own children write first."""

    path: str
    first: int = 0  # the place of its first group among all
    children: dict[str, _Module] = field(default_factory=dict)
    groups: list[tuple[int, Group]] = field(default_factory=list)

    def every(self) -> Iterator[Group]:
        """Yield all groups at and below the module."""
        yield from (group for _, group in self.groups)
        for child in self.children.values():
            yield from child.every()

    def lines(self, depth: int) -> int:
        """Return the number of lines of the module, shown ``depth`` levels down."""
        if depth <= 0:
            return 1
        return 1 + len(self.groups) + sum(child.lines(depth - 1) for child in self.children.values())

    def depth(self) -> int:
        """Return the number of levels from the module down."""
        return 1 + max((child.depth() for child in self.children.values()), default=0)


def overview(inspection: Inspection, depth: int | None = None) -> Lines:
    """Return the network in one screen or two: the free share, the tree of groups, the reasons for pins.

    ``depth``: levels of the module tree to show; by default as many as fit `READABLE_LINES`.
    """
    channels = inspection.channels
    shapes = ", ".join("x".join(map(str, shape)) for shape in inspection.inputs)
    head = Text(inspection.name, style="bold")
    head.append(
        f"  traced with {shapes}\n{len(unique_layers(channels))} convolutions and linears; "
        f"{len(channels.groups)} groups of channels, {channels.freedom}",
        style="not bold",
    )
    if inspection.regions:
        head.append(
            f"\ntraced in regions: {names(inspection.regions)}; the rest stays Python: {inspection.untraced['']}",
            style="not bold yellow",
        )
    root = _tree(channels)
    shown = depth or max(
        (d for d in range(1, root.depth() + 1) if root.lines(d) <= READABLE_LINES), default=1
    )
    tree = Tree(Text("groups by the module that writes them first"))
    _grow(tree, root, shown)
    return Lines(head, Text(""), tree, Text(""), _pins(channels))


def _tree(channels: ChannelGraph) -> _Module:
    root = _Module("")
    for place, group in enumerate(channels.groups):
        parent = root
        parts = _home(group).split(".")[:-1]
        for index, name in enumerate(parts):
            parent = parent.children.setdefault(name, _Module(".".join(parts[: index + 1]), place))
        parent.groups.append((place, group))
    return root


def _home(group: Group) -> str:
    return (*group.producers, *group.consumers, group.name)[0]


def _grow(tree: Tree, module: _Module, depth: int) -> None:
    order: list[tuple[int, Group | _Module]] = list(module.groups)
    order += [(child.first, child) for child in module.children.values()]
    for _, item in sorted(order, key=lambda pair: pair[0]):
        if isinstance(item, Group):
            tree.add(_group_line(item))
            continue
        line = Text(item.path.rpartition(".")[2], style="bold")
        if depth <= 1:
            line.append(f"  {_sum(list(item.every()))}", style="not bold")
            tree.add(line)
        else:
            _grow(tree.add(line), item, depth - 1)


def _group_line(group: Group) -> Text:
    home = _home(group)
    last = home.rpartition(".")[2]
    name = group.name.replace(home, last, 1)
    line = Text(name, style="cyan" if group.free else "dim")
    line.append(f"  {group.size} unit{'s' * (group.size > 1)}", style="default")
    if group.free:
        line.append(f", may keep {counts(group.choices)}{group.note}", style="default")
    else:
        line.append(f", must stay: {'; '.join(group.pinned)}", style="yellow")
    others = [path for path in group.producers if path != home]
    if others:
        line.append(f"; written by {names(others)} too", style="dim")
    readers = [path for path in group.consumers if path != home]
    if readers:
        line.append(f"; read by {names(readers)}", style="dim")
    return line


def _sum(groups: Sequence[Group]) -> str:
    units = sum(group.size for group in groups)
    free = sum(group.size for group in groups if group.free)
    share = "all free" if free == units else f"{free} of them free" if free else "all must stay"
    return f"{len(groups)} group{'s' * (len(groups) > 1)}, {units} units, {share}"


def _pins(channels: ChannelGraph) -> Text:
    reasons = pinned_summary(channels)
    if not reasons:
        return Text("Nothing must stay whole.")
    text = Text("must stay whole:")
    for reason, groups, units in reasons:
        text.append(f"\n  {units} unit{'s' * (units > 1)} of {groups} group{'s' * (groups > 1)}: {reason}")
    return text


def group_text(channels: ChannelGraph, name: str) -> Text:
    """Return everything about one group; `InputError` for an unknown name."""
    group = channels[name]
    text = Text(group.name, style="bold")
    text.append(f"\n{group.size} unit{'s' * (group.size > 1)}", style="not bold")
    if group.free:
        text.append(f", free; may keep {', '.join(map(str, group.choices))}{group.note}", style="not bold")
    else:
        text.append("; must stay:", style="not bold")
        units = set(group.units.tolist())
        reasons = {reason for unit in units for reason in channels.units.why.get(unit)}
        for reason in sorted(reasons):
            text.append(f"\n  - {channels.trail.explained(reason)}", style="yellow")
    for title, side, direction in (("written by", "out", "output"), ("read by", "in", "input")):
        members = [(path, n) for (path, where), n in group.channels.items() if where == side]
        if members:
            text.append(f"\n{title}", style="not bold")
        for path, count in members:
            each = f"{count} {direction} channel{'s' * (count > 1)} a unit"
            text.append(f"\n  - {path}: {each}", style="not bold")
    return text


def module_text(channels: ChannelGraph, path: str) -> Text:
    """Return the layers at or below a module: their shapes, and the groups on each side.

    Raises `InputError` for a module without convolutions or linears.
    """
    return Text("\n").join(_layer_text(channels, layer) for layer in layers_of(channels, path))


def layers_of(channels: ChannelGraph, path: str) -> list[Layer]:
    """Return the layers at or below a module; `InputError` if there is none."""
    layers = [la for la in unique_layers(channels) if la.path == path or la.path.startswith(path + ".")]
    if not layers:
        near = [layer.path for layer in unique_layers(channels)]
        raise InputError(
            f"{path!r} is not a convolution or linear of this network and holds none; there are {names(near)}"
        )
    return layers


def _layer_text(channels: ChannelGraph, layer: Layer) -> Text:
    text = Text(layer.path, style="bold")
    kind = "depthwise, " if layer.kind == "depthwise" else f"{layer.groups} groups, " * (layer.groups > 1)
    text.append(
        f"  {kind}weight {_shape(layer.weight_shape)}, {_shape(layer.in_shape)} to {_shape(layer.out_shape)}",
        style="not bold",
    )
    for title, labels in (("reads", layer.input_channels), ("writes", layer.output_channels)):
        for name, count in groups_of(channels, labels).items():
            text.append(f"\n  {title} {count} channel{'s' * (count > 1)} ", style="not bold")
            if not name:
                text.append("that belong to no group (network inputs, constants)", style="not bold dim")
                continue
            group = channels[name]
            text.append(f"of {name}", style="not bold cyan" if group.free else "not bold dim")
            if not group.free:
                text.append(f", must stay: {'; '.join(group.pinned)}", style="not bold yellow")
    return text


def channel_text(channels: ChannelGraph, path: str, channel: int, side: str) -> Text:
    """Return why a layer's channel must stay, or which go with it; errors as `ChannelGraph.explain`."""
    return Text(channels.explain(path, channel, side))


def counts(permitted: Sequence[int]) -> str:
    """Return permitted counts, shortened: "8, 16, ... 64"."""
    if len(permitted) <= _MOST:
        return ", ".join(map(str, permitted))
    return f"{permitted[0]}, {permitted[1]}, ... {permitted[-1]}"


def names(paths: Sequence[str]) -> str:
    """Return a list of names, shortened."""
    shown = ", ".join(paths[:_MOST])
    return shown + (f" and {len(paths) - _MOST} more" if len(paths) > _MOST else "")


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
