"""TensorRT on a GPU, in one call: engines against PyTorch, a table against engines, targets, solvers on the GPU.

python tools/bench/tensorrt.py --out tensorrt.json [--worker-python "$TRT_PYTHON" --no-library-tactics]

Every part writes its results or its error when it is done; parts without time left say so. With --folder, the table,
engines and timing caches are kept, and a second call with --parts continues where the first stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tensorrt_others import Runtimes
from tensorrt_solvers import solvers_on_gpu
from tensorrt_verdicts import agreement, runtimes, summary, verdicts

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np  # noqa: E402 - this file's folder must not hide the package tensorrt
import torch  # noqa: E402
import torchvision  # noqa: E402
from torch import nn  # noqa: E402

import smcp_fx  # noqa: E402
from smcp_fx.backends import Engine, compare, get_backend  # noqa: E402
from smcp_fx.backends.base import Array  # noqa: E402
from smcp_fx.backends.layers import blocks_beside_layers  # noqa: E402
from smcp_fx.backends.tensorrt.backend import TensorRTBackend, reference_outputs  # noqa: E402
from smcp_fx.errors import InfeasibleBudgetError, SmcpError  # noqa: E402
from smcp_fx.latency.cost import LatencyCost, latency_of  # noqa: E402
from smcp_fx.latency.filling import MeasuringProgress  # noqa: E402
from smcp_fx.latency.network import SURE, NetworkLatency  # noqa: E402
from smcp_fx.latency.rounds import measure_for_targets  # noqa: E402
from smcp_fx.latency.table import LatencyTable  # noqa: E402
from smcp_fx.storage.files import write_texts  # noqa: E402
from smcp_fx.zoo.models import build_model  # noqa: E402

TARGETS = (0.80, 0.55, 0.30)
TRIES = 3
KEEP = (0.85, 0.7, 0.55, 0.4, 0.3)
LIBRARIES = ("CUBLAS", "CUBLAS_LT", "CUDNN")
#: The parts in order, and the seconds that must be left to begin one.
PARTS = {
    "smoke": 10, "engines": 30, "solvers": 10, "table": 60, "targets": 60, "prunings": 30, "int8": 40, "others": 20,
}  # fmt: skip
#: Seconds that the table leaves to the parts after it: an unfinished one goes on with --folder.
AFTER_TABLE = 150


class NoTimeError(BaseException):
    """Time is up, or nearly. Not an `Exception`, which a table would take for a failed row."""


class Bench:
    """The parts, in order; ``results`` is what is written."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.folder = arguments.folder or Path(tempfile.mkdtemp(prefix="smcp-tensorrt-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.backend = self.make_backend("fp16")
        self.results: dict[str, Any] = {
            "about": self.backend.about(), "torch": torch.__version__, "torchvision": torchvision.__version__,
            "python": sys.version.split()[0], "fingerprint": self.backend.fingerprint().as_dict(),
            "model": arguments.model, "batch": arguments.batch, "side": arguments.side,
        }  # fmt: skip
        self.results |= self.earlier()
        torch.manual_seed(0)
        self.model = build_model(arguments.model).eval().to(self.device)
        self.longest_build = 10.0
        self.cost: NetworkLatency | None = None
        self.prepared: Any = None
        self.dense: Engine | None = None

    def make_backend(self, precision: str, calibration: Sequence[Array] = ()) -> TensorRTBackend:
        """The backend as the command line asks for it."""
        a = self.arguments
        found = get_backend(
            "tensorrt", precision=precision, calibration=calibration, worker_python=a.worker_python,
            builders=a.builders, folder=self.folder,
            tactic_sources_off=LIBRARIES if a.no_library_tactics else (), timeout_s=30 * a.minutes,
        )  # fmt: skip
        assert isinstance(found, TensorRTBackend)
        return found

    def earlier(self) -> dict[str, Any]:
        """Results of the same kind in --out, of parts that are not asked for now."""
        out: Path = self.arguments.out
        if not out.exists() or set(self.arguments.parts) == set(PARTS):
            return {}
        before = json.loads(out.read_text(encoding="utf-8"))
        same = all(
            before.get(name) == self.results[name] for name in ("fingerprint", "model", "batch", "side")
        )
        return {name: before[name] for name in PARTS if name in before} if same else {}

    def left(self) -> float:
        """Seconds left."""
        return 60 * self.arguments.minutes - (time.monotonic() - self.began)

    def need(self, seconds: float) -> None:
        """Stop where less is left."""
        if self.left() < seconds:
            raise NoTimeError(f"{self.left():.0f} s are left, {seconds:.0f} s are needed")

    def go(self) -> int:
        """Run the parts; 0 when all of them came to an end."""
        ok = True
        signal.signal(signal.SIGALRM, _time_is_up)
        for name in self.arguments.parts:
            began, part = time.monotonic(), getattr(self, name)
            found: dict[str, Any] = {}
            try:
                self.need(PARTS[name])
                signal.setitimer(signal.ITIMER_REAL, max(self.left(), 1e-3))
                part(found)
            except (Exception, NoTimeError) as error:  # the other parts go on
                ok = False
                found["error"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            found["seconds"] = time.monotonic() - began
            self.results[name] = found
            self.results |= {"verdicts": verdicts(self.results), "runtimes_ms": runtimes(self.results)}
            write_texts(
                {self.arguments.out: json.dumps(self.results, indent=1, default=float)}, "the results"
            )
            print(
                f"{name}: {found['seconds']:.0f} s" + (f", {found['error']}" if "error" in found else ""),
                flush=True,
            )
        self.backend.close()
        for name, verdict in self.results["verdicts"].items():
            print(
                f"{'yes' if verdict['holds'] else 'NO ':3} {name}: {verdict['found']:.4g} ({verdict['limit']})"
            )
        for name, ms in self.results["runtimes_ms"].items():
            print(f"{ms:10.4f} ms  {name}")
        return 0 if ok else 1

    def smoke(self, found: dict[str, Any]) -> None:
        """One convolution: what fails here fails everywhere."""
        x = torch.randn(32, 64, 56, 56)
        with self.backend.compile(
            nn.Conv2d(64, 128, 3, padding=1), (x,), self.folder / "smoke.onnx"
        ) as engine:
            found |= {"median_ms": engine.latency().median_ms, "types": engine.build["types"]}

    # ---- 1: engines against PyTorch -------------------------------------------------------------------------

    def engines(self, found: dict[str, Any]) -> None:
        """Dense engines in fp16 at the batch and at 1, and in fp32 without TF32: outputs, latency, layers."""
        exact = self.make_backend("fp32")
        for name, backend, batch in (
            ("fp16", self.backend, self.arguments.batch), ("fp16_batch1", self.backend, 1), ("fp32", exact, 8)
        ):  # fmt: skip
            self.need(self.longest_build)
            began = time.monotonic()
            x = torch.randn(batch, 3, self.arguments.side, self.arguments.side)
            path = self.folder / f"{name}.onnx"
            engine = backend.compile(copy.deepcopy(self.model).cpu(), (x,), path)
            self.longest_build = max(self.longest_build, time.monotonic() - began)
            expected = reference_outputs(self.model, (x.to(self.device),))[0]
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

    # ---- 2: a table against engines -------------------------------------------------------------------------

    def table(self, found: dict[str, Any]) -> None:
        """The rows that prunings to the targets rest on, as `smcp-table measure --targets` measures them."""
        a = self.arguments
        table = LatencyTable(a.table or self.folder / "table.sqlite")
        found["rows_before"] = len(table.rows(self.backend.fingerprint()))
        began = time.monotonic()
        cost = LatencyCost(table, self.backend, progress=lambda state: self.watch(state, found))
        x = torch.randn(a.batch, 3, a.side, a.side)
        self.prepared = smcp_fx.prepare(copy.deepcopy(self.model).cpu(), (x,), cost=cost)
        found["first_rows_seconds"] = time.monotonic() - began
        self.cost = latency_of(self.prepared.pruner.cost)
        assert self.cost is not None
        measure_for_targets(self.cost, TARGETS)
        error = table.held_out_error(self.cost.blocks, self.backend.fingerprint())
        rows = table.rows(self.backend.fingerprint())
        found |= {
            "complete": True, "blocks": len(self.cost.blocks), "rows": len(rows),
            "measuring_seconds": time.monotonic() - began,
            "held_out": {"points": error.points, "median": error.median, "p95": error.p95, "largest": error.largest},
            "run_overhead_ms": table.run_overhead(self.backend.fingerprint()), "builders": a.builders,
        }  # fmt: skip

    def watch(self, state: MeasuringProgress, found: dict[str, Any]) -> None:
        """Keep how far the table is, and stop it in time for what comes after it."""
        found |= {"complete": False, "rows": state.measured, "remaining_seconds": state.remaining_seconds}
        later = set(self.arguments.parts) & {"prunings", "targets", "int8", "others"}
        self.need(AFTER_TABLE if later else 5)

    def priced(self) -> NetworkLatency:
        """The table's prices; made from its rows where this call did not measure it."""
        if self.cost is None and "table" not in self.arguments.parts:
            self.table({})
        if self.cost is None:
            raise RuntimeError("the table is not complete: see there, and go on with --folder and --parts")
        return self.cost

    def dense_engine(self) -> Any:
        """The dense network's engine, as it is emitted: built once."""
        if self.dense is None:
            self.dense = self.emitted(self.priced().full_counts, "dense")
        return self.dense

    def emitted(self, counts: Mapping[str, int], name: str) -> Any:
        """An engine of the network with the first so many units of each group."""
        free = (group for group in self.prepared.channels.groups if group.free)
        self.prepared.set_masks({g.name: torch.arange(g.size) < counts[g.name] for g in free})
        return self.engine_of(smcp_fx.convert(self.prepared), name)

    def engine_of(self, module: nn.Module, name: str) -> Any:
        """An engine of a module at the batch."""
        a, began = self.arguments, time.monotonic()
        self.need(self.longest_build)
        engine = self.backend.compile(
            module, (torch.randn(a.batch, 3, a.side, a.side),), self.folder / f"{name}.onnx"
        )
        self.longest_build = max(self.longest_build, time.monotonic() - began)
        return engine

    def prunings(self, found: dict[str, Any]) -> None:
        """Sum of the table against engines: the dense network and random prunings of five sizes."""
        prices_of = self.priced()
        rng, full = np.random.default_rng(0), prices_of.full_counts
        permitted = self.prepared.pruner.cost.permitted
        rows: list[dict[str, Any]] = found.setdefault("networks", [])
        for keep in (1.0, *KEEP):
            counts = dict(full)
            for name, allowed in permitted.items():
                share = float(np.clip(rng.normal(keep, 0.15), 0.1, 1.0)) if keep < 1 else 1.0
                counts[name] = min(allowed, key=lambda count, top=allowed[-1], s=share: abs(count - s * top))
            prices_of.learn(counts, SURE)  # the rows of a choice, as the product measures them
            engine = self.dense_engine() if keep == 1 else self.emitted(counts, f"keep{keep}")
            measured = engine.latency()
            prices = {term.name: term.cost(counts) for term in prices_of.around(counts).terms}
            rows.append({
                "keep": keep, "predicted_ms": prices_of.latency(counts), "measured_ms": measured.median_ms,
                "spread": measured.spread, "layers": blocks_beside_layers(prices_of.blocks, prices, engine.layers()),
            })  # fmt: skip
            if engine is not self.dense:
                engine.close()
            found |= agreement(rows)

    # ---- 3: targets -----------------------------------------------------------------------------------------

    def targets(self, found: dict[str, Any]) -> None:
        """Importances from a few hundred steps on generated images; then each target, measured beside the dense."""
        self.priced()
        dense, prepared = self.dense_engine(), self.prepared
        free = (group for group in prepared.channels.groups if group.free)
        prepared.set_masks({g.name: torch.ones(g.size, dtype=torch.bool) for g in free})
        found |= {"steps": self.arguments.steps, "losses": self.train(prepared)}
        tried: dict[float, list[dict[str, Any]]] = {asked: [] for asked in TARGETS}
        corrections = dict.fromkeys(TARGETS, 1.0)
        for _ in range(TRIES):  # each target once, before any of them again
            for asked, tries in tried.items():
                if tries and ("error" in tries[-1] or abs(tries[-1]["measured"] - asked) <= 0.01):
                    continue
                prepared.pruner.correction = corrections[asked]
                try:
                    solve = prepared.pruner.solve(asked)
                except InfeasibleBudgetError as error:
                    tries.append({"error": str(error)})
                else:
                    tries.append(self.held_against(dense, solve, f"target{asked}"))
                    # as the compiler corrects: the same error is expected of the next choice
                    corrections[asked] = tries[-1]["measured"] / tries[-1]["predicted"]
                found["targets"] = {
                    str(target): summary(target, done) for target, done in tried.items() if done
                }
        if any("error" in tries[0] for tries in tried.values()):
            raise RuntimeError("a target cannot be reached: see there")

    def held_against(self, dense: Engine, solve: Any, name: str) -> dict[str, float]:
        """What a solve's network was predicted to take, and takes, as fractions of the dense one."""
        with self.engine_of(smcp_fx.convert(self.prepared), name) as engine:
            found = compare(dense, engine)
        return {
            "predicted": solve.cost / self.prepared.pruner.full_cost,
            "measured": found.fraction, "dense_ms": found.dense.median_ms,
        }  # fmt: skip

    def train(self, prepared: Any) -> list[float]:
        """Train on images whose class is a pattern's direction, gathering importance; returns some losses."""
        a, generator = self.arguments, torch.Generator().manual_seed(0)
        prepared.to(self.device).train()
        optimizer = torch.optim.SGD(prepared.parameters(), 0.01, momentum=0.9)
        side = min(a.side, 96)
        patterns, losses = torch.randn(10, 3, side, side, generator=generator), list[float]()
        for step in range(a.steps):
            labels = torch.randint(10, (32,), generator=generator)
            images = patterns[labels] + torch.randn(32, 3, side, side, generator=generator)
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

    def solvers(self, found: dict[str, Any]) -> None:
        """The knapsack, and the allocator with its values on the GPU, against the CPU."""
        if self.device != "cuda":
            raise RuntimeError("PyTorch finds no GPU")
        found |= solvers_on_gpu(self.model)

    def int8(self, found: dict[str, Any]) -> None:
        """The dense network in INT8 beside its fp16 engine, calibrated on random images."""
        a, rng = self.arguments, np.random.default_rng(0)
        images = [rng.standard_normal((8, 3, a.side, a.side)).astype(np.float32) for _ in range(4)]
        backend, began = self.make_backend("int8", images), time.monotonic()
        x = torch.randn(a.batch, 3, a.side, a.side)
        with backend.compile(copy.deepcopy(self.model).cpu(), (x,), self.folder / "int8.onnx") as engine:
            found |= {"building_seconds": time.monotonic() - began, "types": engine.build["types"]}
            found |= {"median_ms": engine.latency().median_ms, "remarks": engine.remarks}
        backend.close()

    def others(self, found: dict[str, Any]) -> None:
        """The dense network in fp16 in PyTorch and in ONNX Runtime, where these can."""
        a = self.arguments
        runtimes = Runtimes(self.model, (a.batch, 3, a.side, a.side), self.folder)
        for name, way in runtimes.ways().items():
            try:
                self.need(15)
                found[name] = {"median_ms": way()}
            except (SmcpError, ImportError) as error:
                found[name] = {"not_available": str(error)[:500]}
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise NoTimeError("the minutes are over")


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("tensorrt.json"))
    parser.add_argument("--worker-python", default=os.environ.get("TRT_PYTHON"))
    parser.add_argument("--no-library-tactics", action="store_true", help="builder without cuBLAS and cuDNN")
    parser.add_argument("--model", default="torchvision:resnet50", help="or timm:NAME, file.py:factory")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=200, help="of training, for the importances")
    parser.add_argument("--builders", type=int, default=4)
    parser.add_argument("--table", type=Path, help="table to use and extend (default: a new one)")
    parser.add_argument("--folder", type=Path, help="keep table, engines and timing caches here")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), metavar="PART",
                        help=f"of {' '.join(PARTS)} (default: all)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop (default: 9)")
    try:
        return Bench(parser.parse_args()).go()
    except SmcpError as error:
        print(f"tensorrt.py: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
