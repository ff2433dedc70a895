"""The tables of the channel graph's benchmark, from its rows: printed, or as a document."""

from __future__ import annotations

import statistics
import sys
from typing import Any

NETWORKS = [
    "resnet50", "densenet201", "efficientnet_v2_l", "shufflenet_v2_x1_0", "convnext_tiny", "swin_t", "vit_b_16",
    "yolo11n",
]  # fmt: skip
CHAINS = ["chain_100", "chain_1000", "chain_5000"]
OURS, PEER = "smcp_fx", "torch-pruning"
STAGES = ["graph", "prune"]


def summary(rows: list[dict[str, Any]], network: str, stage: str, tool: str) -> list[str]:
    """Time (its range) and its two parts, processor time, memory; or how it failed."""
    mine = [r for r in rows if (r["network"], r["stage"], r["tool"]) == (network, stage, tool)]
    failed = [r for r in mine if r["status"] != "done"]
    if failed:
        return [f"failed: {failed[-1]['why']}", "", "", ""]
    if not mine:
        return ["", "", "", ""]
    times = sorted(r["seconds"] for r in mine)
    text = f"{statistics.median(times):.2f} ({times[0]:.2f}-{times[-1]:.2f})"
    parts = " + ".join(f"{statistics.median(p):.2f}" for p in zip(*(r["parts"] for r in mine), strict=True))
    cpu, peak = (statistics.median(r[key] for r in mine) for key in ("cpu_s", "peak_mib"))
    return [text, parts, f"{cpu:.2f}", f"{peak:.0f}"]


def comparison(rows: list[dict[str, Any]], stage: str) -> tuple[list[str], list[list[str]]]:
    """One line a network, both tools side by side."""
    heads = ["network"]
    for tool in (OURS, PEER):
        heads += [f"{tool}, s", "parts, s", "CPU s", "MiB"]
    names = [n for n in NETWORKS + CHAINS if any(r["network"] == n for r in rows)]
    return heads, [[n, *(c for tool in (OURS, PEER) for c in summary(rows, n, stage, tool))] for n in names]


def linearity(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """One line a chain: its nodes, and what a block of it takes in each stage."""
    lines = []
    for network in CHAINS:
        cells = [network.removeprefix("chain_")]
        done = [r for r in rows if r["network"] == network and r["tool"] == OURS and r["status"] == "done"]
        cells.append(f"{next((r['nodes'] for r in done if 'nodes' in r), 0):,}")
        for stage in STAGES:
            mine = [r for r in done if r["stage"] == stage]
            for values in (
                [r["seconds"] * 1e3 for r in mine],
                [r["cpu_s"] * 1e3 for r in mine],
                [r["peak_mib"] * 1024 for r in mine],
            ):
                cells.append(f"{statistics.median(values) / int(cells[0]):.2f}" if values else "")
        if done:
            lines.append(cells)
    units = [f"{stage}, {unit} a block" for stage in STAGES for unit in ("ms", "CPU ms", "KiB")]
    return ["blocks", "nodes", *units], lines


def titled(rows: list[dict[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """All tables: title, heads, lines."""
    return [
        ("Channel graph (trace + graph | dependencies + groups)", *comparison(rows, "graph")),
        ("Pruning (prepare + convert | pruner + step)", *comparison(rows, "prune")),
        ("Chains of residual blocks", *linearity(rows)),
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150)
    for title, heads, lines in titled(rows):
        table = Table(title=title)
        for head in heads:
            table.add_column(head)
        for line in lines:
            table.add_row(*line)
        console.print(table)


def render(rows: list[dict[str, Any]]) -> str:
    """The document."""
    last = rows[-1]
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    load = statistics.median(r["load"] for r in rows)
    repeats = 1 + max(r["repeat"] for r in rows)
    lines = [
        "# Channel graph: time and memory",
        "",
        "Written by `python tools/bench/channel_graph.py --page docs/results/channel_graph.md`, which says what is",
        "timed. Images of 224x224, batch 1, one thread, random weights. Each measurement has a process",
        f"of its own; medians of up to {repeats} interleaved repeats, their range in brackets. *Parts*: the two",
        "steps that the table's title names. *CPU s*: processor time, which other work on the machine disturbs less.",
        "*MiB*: peak memory above the model's. `prepare` also runs the network before and after, and compares",
        "outputs and gradients: most of its time (`check=False` leaves it out).",
        "",
        f"{last['machine']}; {versions}. Load average while measuring (median): {load:.1f}.",
    ]
    for title, heads, cells in titled(rows):
        title = title.replace("|", "and, for torch-pruning,")
        lines += ["", f"## {title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in cells]
    return "\n".join(lines) + "\n"
