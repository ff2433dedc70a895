"""TensorRT on a GPU, in one call: engines against PyTorch, a table against engines, targets, solvers on the GPU.

python tools/bench/tensorrt.py --out tensorrt.json [--worker-python "$TRT_PYTHON" --no-library-tactics]

Every part writes its results when it is done, an error where it failed; parts for which no time is left say so.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np  # noqa: E402 - this file's folder must not hide the package tensorrt
import torch  # noqa: E402
import torchvision  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402
from torch import nn  # noqa: E402

import smcp_fx  # noqa: E402
from smcp_fx.backends import Engine, get_backend, measure_interleaved  # noqa: E402
from smcp_fx.backends.tensorrt_backend import TensorRTBackend  # noqa: E402
from smcp_fx.backends.tensorrt_layers import blocks_beside_layers  # noqa: E402
from smcp_fx.files import write_texts  # noqa: E402
from smcp_fx.knapsack import solve_knapsack  # noqa: E402
from smcp_fx.latency_cost import LatencyCost  # noqa: E402
from smcp_fx.latency_table import LatencyTable  # noqa: E402

TARGETS = (0.80, 0.55, 0.30)
KEEP = (0.85, 0.7, 0.55, 0.4, 0.3)
LIBRARIES = ("CUBLAS", "CUBLAS_LT", "CUDNN")


class Bench:
    """The parts, in order; ``results`` is what is written."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.folder = Path(tempfile.mkdtemp(prefix="smcp-tensorrt-"))
        self.backend = self.make_backend("fp16")
        self.results: dict[str, Any] = {
            "about": self.backend.about(), "torch": torch.__version__, "torchvision": torchvision.__version__,
            "python": sys.version.split()[0], "fingerprint": self.backend.fingerprint().as_dict(),
            "model": arguments.model, "batch": arguments.batch, "side": arguments.side,
        }  # fmt: skip
        torch.manual_seed(0)
        self.model = torchvision.models.get_model(arguments.model).eval().to(self.device)
        self.cost: LatencyCost | None = None
        self.prepared: Any = None
        self.dense: Engine | None = None

    def make_backend(self, precision: str) -> TensorRTBackend:
        """The backend as the command line asks for it."""
        a = self.arguments
        found = get_backend(
            "tensorrt", precision=precision, worker_python=a.worker_python, builders=a.builders, folder=self.folder,
            tactic_sources_off=LIBRARIES if a.no_library_tactics else (),
        )  # fmt: skip
        assert isinstance(found, TensorRTBackend)
        return found

    def left(self) -> float:
        """Seconds left."""
        return 60 * self.arguments.minutes - (time.monotonic() - self.began)

    def go(self) -> int:
        """Run the parts; 0 when all of them came to an end."""
        ok = True
        parts: tuple[tuple[str, float, Callable[[], Any]], ...] = (
            ("engines", 30, self.engines), ("solvers", 10, self.solvers), ("table", 60, self.table),
            ("prunings", 30, self.prunings), ("targets", 60, self.targets), ("others", 20, self.others),
        )  # fmt: skip
        for name, least, part in parts:
            began = time.monotonic()
            try:
                if self.left() < least:
                    raise TimeoutError(f"{self.left():.0f} s are left, {least:.0f} s are needed")
                self.results[name] = part()
            except Exception as error:  # the other parts go on
                ok = False
                self.results[name] = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            self.results[name]["seconds"] = time.monotonic() - began
            write_texts(
                {self.arguments.out: json.dumps(self.results, indent=1, default=float)}, "the results"
            )
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        self.backend.close()
        return 0 if ok else 1

    # ---- 1: engines against PyTorch -------------------------------------------------------------------------

    def engines(self) -> dict[str, Any]:
        """Dense engines in fp16 at the batch and at 1, and in fp32 without TF32: outputs, latency, layers."""
        found: dict[str, Any] = {}
        exact = self.make_backend("fp32")
        for name, backend, batch in (
            ("fp16", self.backend, self.arguments.batch), ("fp16_batch1", self.backend, 1), ("fp32", exact, 8)
        ):  # fmt: skip
            x = torch.randn(batch, 3, self.arguments.side, self.arguments.side)
            path = self.folder / f"{name}.onnx"
            engine = backend.compile(copy.deepcopy(self.model).cpu(), (x,), path)
            with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
                expected = self.model(x.to(self.device)).float().cpu().numpy()
            error = float(np.abs(engine.run([x.numpy()])[0] - expected).max() / np.abs(expected).max())
            timings = {
                mode: backend.ask("measure", key=engine._key, timing={"graph": mode == "graph"})["measured"]
                for mode in ("graph", "enqueue")
            }
            build = {
                k: engine.build[k] for k in ("seconds", "engine_bytes", "types", "reformats", "notes", "tf32")
            }
            found[name] = {"batch": batch, "relative_error": error, "build": build, **timings,
                           "layers": engine.layers(), "clocks": backend.ask("clocks")["clocks"]}  # fmt: skip
            engine.close()
        exact.close()
        return found

    # ---- 2: a table against engines -------------------------------------------------------------------------

    def table(self) -> dict[str, Any]:
        """The table of the network's blocks."""
        a = self.arguments
        table = LatencyTable(a.table or self.folder / "table.sqlite")
        self.cost = LatencyCost(table, self.backend)
        x = torch.randn(a.batch, 3, a.side, a.side)
        self.prepared = smcp_fx.prepare(copy.deepcopy(self.model).cpu(), (x,), cost=self.cost)
        report = self.cost.report
        assert report is not None
        error = table.held_out_error(self.cost.blocks, self.backend.fingerprint())
        return {
            "blocks": len(self.cost.blocks), "rows": report.measured, "reused": report.reused,
            "measuring_seconds": report.seconds, "failed": report.failed, "unstable": len(report.unstable),
            "held_out": {"points": error.points, "median": error.median, "p95": error.p95, "largest": error.largest},
            "run_overhead_ms": table.run_overhead(self.backend.fingerprint()), "builders": a.builders,
        }  # fmt: skip

    def emitted(self, counts: Mapping[str, int], name: str) -> Any:
        """An engine of the network with the first so many units of each group."""
        free = (group for group in self.prepared.channels.groups if group.free)
        self.prepared.set_masks({g.name: torch.arange(g.size) < counts[g.name] for g in free})
        return self.engine_of(smcp_fx.convert(self.prepared), name)

    def engine_of(self, module: nn.Module, name: str) -> Any:
        """An engine of a module at the batch."""
        a = self.arguments
        return self.backend.compile(
            module, (torch.randn(a.batch, 3, a.side, a.side),), self.folder / f"{name}.onnx"
        )

    def prunings(self) -> dict[str, Any]:
        """Sum of the table against engines: the dense network and random prunings of five sizes."""
        assert self.cost is not None
        rng, full = np.random.default_rng(0), self.cost.full_counts
        permitted = self.prepared.pruner.cost.permitted
        self.dense = self.emitted(full, "dense")
        rows: list[dict[str, Any]] = []
        for keep in (1.0, *KEEP):
            counts = dict(full)
            for name, allowed in permitted.items():
                share = float(np.clip(rng.normal(keep, 0.15), 0.1, 1.0)) if keep < 1 else 1.0
                counts[name] = min(allowed, key=lambda count, top=allowed[-1], s=share: abs(count - s * top))
            engine = self.dense if keep == 1 else self.emitted(counts, f"keep{keep}")
            measured = engine.latency()
            cost = self.cost.around(counts)
            prices = {term.name: term.cost(counts) for term in cost.terms}
            rows.append({
                "keep": keep, "predicted_ms": self.cost.latency(counts), "measured_ms": measured.median_ms,
                "spread": measured.spread, "layers": blocks_beside_layers(self.cost.blocks, prices, engine.layers()),
            })  # fmt: skip
            if engine is not self.dense:
                engine.close()
        predicted, measured_ms = (
            np.array([row[key] for row in rows]) for key in ("predicted_ms", "measured_ms")
        )
        errors = np.abs(predicted / measured_ms - 1)
        return {
            "mean_absolute_error": float(errors.mean()), "largest_error": float(errors.max()),
            "spearman": float(spearmanr(predicted, measured_ms)[0]), "networks": rows,
        }  # fmt: skip

    # ---- 3: targets -----------------------------------------------------------------------------------------

    def targets(self) -> dict[str, Any]:
        """Importances from a few hundred steps on generated images; then each target, measured beside the dense."""
        assert self.dense is not None
        prepared, found = self.prepared, dict[str, Any]()
        free = (group for group in prepared.channels.groups if group.free)
        prepared.set_masks({g.name: torch.ones(g.size, dtype=torch.bool) for g in free})
        losses = self.train(prepared)
        for asked in TARGETS:
            prepared.pruner.correction, tried = 1.0, []
            for _ in range(3):
                solve = prepared.pruner.solve(asked)
                with self.engine_of(smcp_fx.convert(prepared), f"target{asked}") as engine:
                    dense, pruned = measure_interleaved([self.dense, engine])
                fraction = pruned.median_ms / dense.median_ms
                tried.append({"predicted": solve.cost / prepared.pruner.full_cost, "measured": fraction})
                if abs(fraction - asked) <= 0.01 or self.left() < 30:
                    break
                prepared.pruner.correction *= fraction / asked
            found[str(asked)] = {"first": tried[0], "best": min(tried, key=lambda t: abs(t["measured"] - asked)),
                                 "tried": tried}  # fmt: skip
        return {"steps": self.arguments.steps, "losses": losses, "targets": found}

    def train(self, prepared: Any) -> list[float]:
        """Train on images whose class is a pattern's direction, gathering importance; returns some losses."""
        a, generator = self.arguments, torch.Generator().manual_seed(0)
        prepared.to(self.device).train()
        optimizer = torch.optim.SGD(prepared.parameters(), 0.01, momentum=0.9)
        patterns, losses = torch.randn(10, 3, 96, 96, generator=generator), []
        for step in range(a.steps):
            labels = torch.randint(10, (32,), generator=generator)
            images = patterns[labels] + torch.randn(32, 3, 96, 96, generator=generator)
            with torch.autocast(self.device, torch.bfloat16):
                loss = nn.functional.cross_entropy(prepared(images.to(self.device)), labels.to(self.device))
            optimizer.zero_grad()
            loss.backward()
            prepared.pruner.step()
            optimizer.step()
            if step % 50 == 0:
                losses.append(float(loss.detach()))
        prepared.cpu().eval()
        return losses

    # ---- 4: solvers on the GPU ------------------------------------------------------------------------------

    def solvers(self) -> dict[str, Any]:
        """The knapsack, and the allocator with its values on the GPU, against the CPU."""
        if self.device != "cuda":
            raise RuntimeError("PyTorch finds no GPU")
        rng, found = np.random.default_rng(0), dict[str, Any]()
        values = [torch.tensor(np.sort(rng.random(64)).cumsum()) for _ in range(60)]
        costs = [torch.tensor(np.sort(rng.integers(1, 10**6, 64)).astype(np.float64)) for _ in range(60)]
        capacity = float(np.floor(0.4 * sum(float(c.max()) for c in costs)))
        answers = {}
        for device in ("cpu", "cuda"):
            began = time.perf_counter()
            put = ([v.to(device) for v in values], [c.to(device) for c in costs])
            answers[device] = solve_knapsack(*put, capacity, device=device)
            found[f"knapsack_{device}_seconds"] = time.perf_counter() - began
        found["knapsack_same_value"] = answers["cpu"].value == answers["cuda"].value
        found["knapsack_optimal"] = bool(answers["cuda"].optimal)
        on_cpu = smcp_fx.prepare(copy.deepcopy(self.model).cpu(), torch.randn(2, 3, 64, 64), target=0.5)
        on_cpu(torch.randn(2, 3, 64, 64)).square().mean().backward()
        on_cpu.pruner.step()
        on_gpu = smcp_fx.prepare(copy.deepcopy(self.model).cpu(), torch.randn(2, 3, 64, 64), target=0.5)
        on_gpu.load_state_dict(on_cpu.state_dict())
        on_gpu.to(self.device)
        for where, prepared in (("cpu", on_cpu), ("cuda", on_gpu)):
            began = time.perf_counter()
            prepared.pruner.solve()
            found[f"allocator_{where}_seconds"] = time.perf_counter() - began
        found["allocator_same_counts"] = on_cpu.pruner.counts == on_gpu.pruner.counts
        return found

    # ---- other ways to run it -------------------------------------------------------------------------------

    def others(self) -> dict[str, Any]:
        """The dense network in PyTorch eager and compiled (channels-last, fp16) and in ONNX Runtime, where it is."""
        a, found = self.arguments, dict[str, Any]()
        x = torch.randn(a.batch, 3, a.side, a.side, dtype=torch.float16).contiguous(
            memory_format=torch.channels_last
        )
        module = copy.deepcopy(self.model).half().to(memory_format=torch.channels_last)
        for name, kind, options in (
            ("torch_eager", "torch", {"device": "cuda"}),
            ("torch_compile", "torch", {"device": "cuda", "compiled": True, "graph_replay": False}),
            ("onnxruntime_cuda", "onnxruntime", {"device": "cuda"}),
        ):
            try:
                if self.left() < 15:
                    raise TimeoutError("no time left")
                given = (module, (x,)) if kind == "torch" else (module.cpu(), (x.contiguous(),))
                with get_backend(kind, **options).compile(*given) as engine:
                    found[name] = {"median_ms": engine.latency().median_ms}
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        return found


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("tensorrt.json"))
    parser.add_argument("--worker-python", default=os.environ.get("TRT_PYTHON"))
    parser.add_argument("--no-library-tactics", action="store_true", help="builder without cuBLAS and cuDNN")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=200, help="of training, for the importances")
    parser.add_argument("--builders", type=int, default=4)
    parser.add_argument("--table", type=Path, help="table to use and extend (default: a new one)")
    parser.add_argument("--minutes", type=float, default=9.5)
    return Bench(parser.parse_args()).go()


if __name__ == "__main__":
    sys.exit(main())
