"""The channel graph in other tools' formats."""

from __future__ import annotations

import io

from smcp_fx.channels import ChannelGraph


def to_graphml(channels: ChannelGraph) -> str:
    """Return the graph of groups and layers as GraphML text (Gephi, yEd, networkx read it)."""
    import networkx as nx

    written = io.BytesIO()
    nx.write_graphml(channels.graph, written, encoding="utf-8")
    return written.getvalue().decode("utf-8")


def to_dot(channels: ChannelGraph) -> str:
    """Return the graph of groups and layers as DOT text (Graphviz reads it): layers are boxes, groups ovals.

    Pinned groups are dashed, with the reason as their tooltip; an edge shows the number of channels per unit,
    if there is more than one.
    """
    lines = ["digraph channels {", '  node [fontname="Helvetica", fontsize=10];']
    for key, node in channels.graph.nodes(data=True):
        if node["kind"] == "layer":
            lines.append(f"  {_quoted(key)} [shape=box];")
            continue
        name = key.removeprefix("group:")
        pinned = f", style=dashed, tooltip={_quoted(node['pinned'])}" if node["pinned"] else ""
        label = _quoted(f"{name}\n{node['size']} units")
        lines.append(f"  {_quoted(key)} [shape=ellipse, label={label}{pinned}];")
    for source, target, edge in channels.graph.edges(data=True):
        several = f" [label={edge['channels']}]" if edge["channels"] > 1 else ""
        lines.append(f"  {_quoted(source)} -> {_quoted(target)}{several};")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
