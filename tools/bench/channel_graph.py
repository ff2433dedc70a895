"""Time and memory of the channel graph and of pruning with it, compared with torch-pruning; needs ultralytics, too.

    python tools/bench/channel_graph.py [--models resnet50] [--repeats 3] [--page docs/results/channel_graph.md]

Two stages. *graph*: here tracing and the channel graph, there the dependency graph and its list of groups.
*prune*: here `prepare` and `convert` with random masks of half the channels, there the construction of its
pruner by magnitude and one step at one half. Each measurement has a process of its own, one thread, and begins
after a small network has gone through the same stage, so that modules loaded on first use do not count; the
networks' repeats are interleaved. After *prune* the smaller network runs once, untimed; one that does not run is
a failure. A stage that failed once is not repeated. Lines of JSON go to ``--record``; what has a line for the
same versions is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from channel_graph_tables import CHAINS, NETWORKS, OURS, PEER, STAGES, render, show

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs" / "records"
PACKAGES = ["torch", "torchvision", "ultralytics", OURS, PEER]
MIB = 1 << 20


# ---- one measurement, in its own process ----------------------------------------------------------------


def measure(tool: str, stage: str, network: str) -> dict[str, Any]:
    """Run one stage once; its seconds by the clock and of the processor, its peak MiB above the model's."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    work: Callable[..., tuple[dict[str, Any], Any]] = {
        (OURS, "graph"): our_graph,
        (OURS, "prune"): our_prune,
        (PEER, "graph"): peer_graph,
        (PEER, "prune"): peer_prune,
    }[tool, stage]
    work(*build("chain_2"))
    model, inputs = build(network)
    shapes = output_shapes(model, inputs)
    parameters = sum(p.numel() for p in model.parameters())
    gc.collect()
    before = resident_memory()
    processor = time.process_time()
    row, smaller = work(model, inputs)
    processor = time.process_time() - processor
    row.update(status="done", cpu_s=processor, peak_mib=(peak_memory() - before) / MIB)
    if smaller is not None:
        row["kept"] = sum(p.numel() for p in smaller.parameters()) / parameters
        try:
            found = output_shapes(smaller.eval(), inputs)
        except Exception as error:
            row.update(status="failed", why=f"pruned, but does not run: {describe(error)}")
        else:
            if found != shapes:
                row.update(status="failed", why=f"outputs of {found}, not {shapes}")
    return row


def output_shapes(model: Any, inputs: Any) -> list[tuple[int, ...]]:
    """The shapes of all tensors that come out."""
    import torch
    from torch.utils import _pytree as pytree

    with torch.no_grad():
        outputs = model(inputs)
    return [tuple(value.shape) for value in pytree.tree_leaves(outputs) if isinstance(value, torch.Tensor)]


def describe(error: Exception) -> str:
    """The error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def build(network: str) -> tuple[Any, Any]:
    """A network with random weights in eval mode, and one input for it."""
    import torch

    if network.startswith("chain_"):
        blocks = [residual_block(8) for _ in range(int(network.removeprefix("chain_")))]
        stem, head = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 1)
        return torch.nn.Sequential(stem, *blocks, head).eval(), torch.randn(1, 3, 8, 8)
    if network.startswith("yolo"):
        from ultralytics import YOLO

        from smcp_fx.integrations.ultralytics import NarrowYolo

        yolo = NarrowYolo(
            YOLO(f"{network}.yaml", verbose=False).model.float()
        )  # as the integration prepares it
        return yolo.eval(), torch.randn(1, 3, 224, 224)
    import torchvision

    return torchvision.models.get_model(network, weights=None).eval(), torch.randn(1, 3, 224, 224)


def residual_block(channels: int) -> Any:
    """Two convolutions and an addition: each block has a group of its own and is part of the chain's."""
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.norm1 = nn.BatchNorm2d(channels)
            self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.norm2 = nn.BatchNorm2d(channels)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()

    return Block()


def our_graph(model: Any, inputs: Any) -> tuple[dict[str, Any], None]:
    """Trace, and build the channel graph, as `prepare` does."""
    from smcp_fx.channels import build as build_channels
    from smcp_fx.tracing.other_sizes import at_another_size
    from smcp_fx.tracing.tracer import trace

    started = time.perf_counter()
    traced = trace(model, (inputs,))
    middle = time.perf_counter()
    graph = build_channels(traced.module, traced.values, multiple=1, other=at_another_size(traced))
    ended = time.perf_counter()
    row = {"seconds": ended - started, "parts": [middle - started, ended - middle]}
    return {**row, "nodes": len(traced.module.graph.nodes), "groups": len(graph.groups)}, None


def our_prune(model: Any, inputs: Any) -> tuple[dict[str, Any], Any]:
    """Prepare, prune a random half of each group's channels, convert."""
    import torch

    import smcp_fx
    from smcp_fx.config import MethodConfig

    started = time.perf_counter()
    prepared = smcp_fx.prepare(model, inputs, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    prepare_s = time.perf_counter() - started
    masks = {}
    for group in prepared.channels.groups:
        if group.free:
            mask = torch.zeros(group.size, dtype=torch.bool)
            mask[torch.randperm(group.size)[: (group.size + 1) // 2]] = True
            masks[group.name] = mask
    prepared.set_masks(masks)
    started = time.perf_counter()
    smaller = smcp_fx.convert(prepared)
    convert_s = time.perf_counter() - started
    return {"seconds": prepare_s + convert_s, "parts": [prepare_s, convert_s]}, smaller


def peer_graph(model: Any, inputs: Any) -> tuple[dict[str, Any], None]:
    """Build the dependency graph, and list its groups."""
    import torch_pruning

    started = time.perf_counter()
    graph = torch_pruning.DependencyGraph().build_dependency(model, inputs, verbose=False)
    middle = time.perf_counter()
    groups = sum(1 for _ in graph.get_all_groups())
    ended = time.perf_counter()
    row = {"seconds": ended - started, "parts": [middle - started, ended - middle]}
    return {**row, "groups": groups}, None


def peer_prune(model: Any, inputs: Any) -> tuple[dict[str, Any], Any]:
    """Construct the pruner by magnitude as its documentation does, and take one step at one half."""
    import torch_pruning
    from torch import nn

    modules = list(model.modules())
    classifier = next(m for m in reversed(modules) if isinstance(m, (nn.Linear, nn.Conv2d)))
    heads = {m: m.num_heads for m in modules if isinstance(m, nn.MultiheadAttention)}
    started = time.perf_counter()
    pruner = torch_pruning.pruner.MagnitudePruner(
        model,
        inputs,
        importance=torch_pruning.importance.MagnitudeImportance(),
        pruning_ratio=0.5,
        ignored_layers=[classifier],
        num_heads=heads,
        round_to=max(heads.values(), default=None),
    )
    middle = time.perf_counter()
    pruner.step()
    ended = time.perf_counter()
    if hasattr(model, "hidden_dim"):  # torchvision's ViT checks its width against this field
        model.hidden_dim = model.conv_proj.out_channels
    return {"seconds": ended - started, "parts": [middle - started, ended - middle]}, model


def resident_memory() -> float:
    """Bytes held now; where the system allows, the peak starts again from here."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    return peak_memory()


def peak_memory() -> float:
    """Most bytes held since the process began, or since `resident_memory`."""
    with contextlib.suppress(OSError):
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def answer(task: str, gigabytes: int) -> None:
    """Measure what the parent asked for and print the row."""
    resource.setrlimit(resource.RLIMIT_DATA, (gigabytes << 30, gigabytes << 30))
    try:
        row = measure(*json.loads(task))
    except Exception as error:
        row = {"status": "failed", "why": describe(error)}
    print("\n" + json.dumps(row))


# ---- the run --------------------------------------------------------------------------------------------


def launch(task: tuple[str, str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Run one measurement in a fresh process; its row, or one that says how it ended."""
    command = [sys.executable, __file__, "--task", json.dumps(task), "--gigabytes", str(options.gigabytes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    load = os.getloadavg()[0]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=options.seconds
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "why": f"not done after {options.seconds} s", "load": load}
    try:
        row = dict(json.loads(ended.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1][:200]
        row = {"status": "failed", "why": f"ended with exit code {ended.returncode}: {last}"}
    return {**row, "load": load}


def tasks(options: argparse.Namespace, versions: dict[str, str]) -> Iterator[tuple[int, str, str, str]]:
    """Repeat, tool, stage, network: the repeats of one measurement are as far apart as they can be."""
    for repeat in range(options.repeats):
        for network in options.models:
            for stage in STAGES:
                for tool in (OURS, PEER):
                    if tool == OURS or (PEER in versions and network not in CHAINS[1:]):
                        yield repeat, tool, stage, network


def read(record: Path) -> list[dict[str, Any]]:
    """The rows of the record."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def installed() -> dict[str, str]:
    """Versions of what is measured, and of what it runs on."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def machine() -> str:
    """The processor's name, its cores and the system."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def main() -> int:
    """Measure what has no row yet, print the tables, write the page."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--models", nargs="+", default=NETWORKS + CHAINS, choices=NETWORKS + CHAINS)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each, interleaved")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of one measurement")
    parser.add_argument("--gigabytes", type=int, default=10, help="memory limit of one measurement")
    parser.add_argument(
        "--record", type=Path, default=DOCS / "channel_graph.jsonl", help="the JSON-lines file"
    )
    parser.add_argument("--page", type=Path, help="write the tables as a document")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        answer(options.task, options.gigabytes)
        return 0
    versions, here = installed(), machine()
    rows = [r for r in read(options.record) if r["versions"] == versions and r["machine"] == here]
    keys = ("repeat", "tool", "stage", "network")
    known = {tuple(r[key] for key in keys) for r in rows}
    broken = {tuple(r[key] for key in keys[1:]) for r in rows if r["status"] != "done"}
    for task in tasks(options, versions):
        if task in known or task[1:] in broken:
            continue
        row = dict(zip(keys, task, strict=True)) | launch(task[1:], options)
        if row["status"] != "done":
            broken.add(task[1:])
        row.update(versions=versions, machine=here)
        rows.append(row)
        with options.record.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = f"{row['seconds']:.2f} s" if row["status"] == "done" else row["why"]
        print(*task, shown, file=sys.stderr, flush=True)
    show(rows)
    if options.page and rows:
        options.page.write_text(render(rows))
    return int(any(row["status"] != "done" and row["tool"] == OURS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
