"""TensorRT on an NVIDIA GPU: engines built and timed by a worker process, see `smcp_fx.backends.tensorrt.worker`.

The worker may run under another Python (``worker_python``): then only that one needs TensorRT. A crash of a
builder fails only the engine that it was building.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import shlex
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnx
import torch
from torch import Tensor, nn

from smcp_fx.backends.base import Array, BlockLatency, Fingerprint, to_arrays
from smcp_fx.backends.checking import compare_outputs, module_outputs, random_inputs
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.calibrated import CalibratedBackend
from smcp_fx.backends.onnx.export import export_model_proto, write_model
from smcp_fx.backends.onnx.precision import cast_model
from smcp_fx.backends.tensorrt.answers import (
    OPSET,
    ROW_TIMING,
    fingerprint_of,
    measurement,
    tiny_model,
    written_block,
)
from smcp_fx.backends.tensorrt.engine import TensorRTEngine
from smcp_fx.backends.tensorrt.options import checked_precision
from smcp_fx.backends.tensorrt.quantization import TENSORRT
from smcp_fx.backends.tensorrt.worker.building import BuildOptions
from smcp_fx.backends.tensorrt.worker.client import InProcess, Worker, WorkerProcess, archive
from smcp_fx.backends.tensorrt.worker.problems import WorkerError, cache_folder
from smcp_fx.backends.tensorrt.worker.serving import description
from smcp_fx.backends.timing.measuring import TimingConfig
from smcp_fx.errors import BackendError, InputError

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block

#: Largest difference from PyTorch's float32 outputs (int8: from ONNX Runtime's of the same file), relative to
#: their scale. TF32 keeps ten bits of the mantissa; in int8, another order of sums moves some bytes by one.
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 8e-2, "int8": 8e-2}

#: Engines that each builder builds before they are measured. Chosen, not measured.
_AHEAD = 3


class TensorRTBackend(CalibratedBackend):
    """TensorRT with fixed settings on GPU ``gpu``.

    ``precision``: "fp32", "fp16" (the default), "bf16", or "int8", calibrated on the batches of
    ``calibration``; checked layer by layer in every engine. ``tf32``: whether fp32 may use it.
    ``worker_python``: command of the Python that has TensorRT (default: this one). ``in_process``: use this
    process as the worker. ``builders``: processes that build the next rows' engines in parallel. ``folder``:
    of the timing caches. ``check``: start the worker now, to report missing parts. The rest: `BuildOptions`.
    """

    name: ClassVar[str] = "tensorrt"
    scheme = TENSORRT

    def __init__(
        self,
        threads: int = 1,
        precision: str | None = None,
        calibration: Sequence[Array] = (),
        *,
        tf32: bool = False,
        gpu: int = 0,
        worker_python: str | None = None,
        in_process: bool = False,
        builders: int = 1,
        graph_replay: bool = True,
        optimization_level: int | None = None,
        workspace_mib: int | None = None,
        version_compatible: bool = False,
        lean: bool = False,
        tactic_sources_off: Sequence[str] = (),
        folder: Path | str | None = None,
        timeout_s: float = 1800.0,
        check: bool = True,
    ) -> None:
        precision = checked_precision(precision)
        super().__init__(precision, calibration, OPSET)
        if builders < 1:
            raise InputError(f"builders = {builders}: at least 1 is needed")
        self.threads, self.graph_replay = threads, graph_replay  # the host's threads do not matter on a GPU
        self.options = BuildOptions(
            precision, tf32, optimization_level=optimization_level, workspace_mib=workspace_mib,
            version_compatible=version_compatible, lean=lean, tactic_sources_off=tuple(tactic_sources_off),
        )  # fmt: skip
        self.scratch = Path(tempfile.mkdtemp(prefix="smcp_fx-tensorrt-"))
        self._cache = Path(folder) if folder is not None else cache_folder()
        command = shlex.split(worker_python or "") or [sys.executable]
        command += [str(self.scratch / "worker.pyz"), "--serve", "--gpu", str(gpu)]
        self._workers: list[Worker] = []
        self._command, self._in_process, self._gpu, self._timeout_s = command, in_process, gpu, timeout_s
        self.builders, self._keys = builders, itertools.count()
        self._models = BlockModels(OPSET)
        self._prebuilt: dict[tuple[str, tuple[int, ...]], Path | Exception] = {}
        self._coming: dict[tuple[str, tuple[int, ...]], Block] = {}  # rows that may be built ahead
        self._about: dict[str, Any] | None = None
        self._owner: TensorRTBackend | None = None  # keeps alive the backend that owns the worker
        self._run_ms: float | None = None
        if not in_process:
            archive(self.scratch / "worker.pyz")
        weakref.finalize(self, _end, self._workers, self.scratch)
        if check:
            self.about()

    # ---- the worker -----------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The number of this worker process; engines loaded in earlier ones are gone."""
        return self._worker().generation

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Return the worker's answer; `BackendError` for its errors, and if it died."""
        try:
            return self._worker().ask(op, **arguments)
        except WorkerError as error:
            raise BackendError(str(error)) from error

    def about(self) -> dict[str, Any]:
        """Return which TensorRT and GPU the worker has."""
        if self._about is None:
            self._about = self.ask("about")
        return self._about

    def new_key(self) -> str:
        """Return a key that no engine in the worker has."""
        return f"engine{next(self._keys)}"

    def close(self) -> None:
        """End the workers and delete the scratch folder; engine files elsewhere stay."""
        _end(self._workers, self.scratch)

    def _worker(self, number: int = 0) -> Worker:
        while len(self._workers) <= number:
            try:
                self._workers.append(
                    InProcess(self._gpu)
                    if self._in_process
                    else WorkerProcess(self._command, self._timeout_s)
                )
            except WorkerError as error:
                raise BackendError(str(error)) from error
        return self._workers[number]

    # ---- what every backend does ----------------------------------------------------------------------------

    def fingerprint(self) -> Fingerprint:
        """Return GPU, driver, TensorRT's version, precision and settings."""
        return fingerprint_of(self.about(), self.options)

    def cache_bytes(self) -> int:
        """Return the size of the GPU's L2 cache."""
        return int(self.about()["l2_bytes"])

    def compile(
        self, module: nn.Module, example_inputs: tuple[Tensor, ...], path: Path | str | None = None
    ) -> TensorRTEngine:
        """Export ``module``, build its engine at the examples' batch, and compare it with the module.

        ``path``: the ONNX file's; the engine lies beside it (.engine), with a description (.engine.json).
        `BackendError` if the outputs differ from PyTorch's (in int8: from the quantised file's) by more than
        `TOLERANCES`, or if the engine lacks the precision asked for.
        """
        onnx_file = Path(path) if path is not None else self.scratch / f"{self.new_key()}.onnx"
        inputs = random_inputs(example_inputs)
        arrays = [array.copy() for array in to_arrays(inputs)]  # the module may write into its inputs
        expected, remarks = reference_outputs(module, inputs), tuple[str, ...]()
        model = export_model_proto(module, example_inputs, opset=OPSET, dynamic_batch=False)
        if self.writer is not None:
            self.writer.name(model)
        names = [value.name for value in model.graph.output]
        if self.calibrated:
            compare_outputs(self._outputs(model, arrays), expected, names)
            model, remarks = self._quantised(model)
            expected = self._outputs(model, arrays)
        else:
            model = cast_model(model, self.precision)
        write_model(model, onnx_file)
        engine_file = onnx_file.with_suffix(".engine")
        self.ask("build", **self._request(onnx_file, block=False), engine=str(engine_file))
        engine = TensorRTEngine(self, engine_file, to_arrays(example_inputs))
        try:
            kind = "tf32" if self.precision == "fp32" and self.options.tf32 else self.precision
            compare_outputs(engine.run(arrays), expected, names, "TensorRT", TOLERANCES[kind])
        except BaseException:
            engine.close()
            raise
        engine.remarks = remarks
        return engine

    def try_export(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> None:
        """Export ``module`` as `compile` does, and build no engine."""
        export_model_proto(module, example_inputs, opset=OPSET, dynamic_batch=False)

    def open(self, path: Path | str, example_inputs: Sequence[Tensor] = ()) -> TensorRTEngine:
        """Load an existing engine file; one of another device or version is refused."""
        return TensorRTEngine(self, Path(path), to_arrays(example_inputs))

    def full_precision(self) -> TensorRTBackend | None:
        """Return a float32 copy of this backend with the same worker; None if this one is in float32."""
        if self.precision == "fp32":
            return None
        plain = copy.copy(self)
        plain.precision, plain.options = "fp32", replace(self.options, precision="fp32")
        plain._prebuilt, plain._coming, plain._run_ms, plain._owner = {}, {}, None, self
        return plain

    def remarks(self) -> tuple[str, ...]:
        """Warn if this GPU has no instructions that multiply bytes."""
        major, minor = (int(part) for part in self.about()["compute_capability"].split("."))
        if not self.calibrated or ((major, minor) >= (6, 1) and (major, minor) != (6, 2)):
            return ()
        return (
            f"this GPU (compute capability {major}.{minor}) has no instructions that multiply bytes: INT8 may be no "
            "faster than float on it",
        )

    def files(self, path: Path | str) -> list[Path]:
        engine = Path(path).with_suffix(".engine")
        return [Path(path), engine, description(engine)]

    def run_overhead_ms(self) -> float | None:
        """Return a run's cost beyond its layers in ms: one small layer alone, less the same one in a row."""
        if self._run_ms is None:
            with self._measurable(self._written(tiny_model()), None) as key:
                alone = self.ask("measure", key=key)["measured"]["median_ms"]
                row = self.ask("measure", key=key, timing={"repeated": True})["measured"]["median_ms"]
            self._run_ms = max(float(alone) - float(row), 0.0)
        return self._run_ms

    def block_latency(
        self, block: Block, widths: tuple[int, ...], config: TimingConfig | None = None
    ) -> BlockLatency:
        """Measure ``block`` at ``widths`` as an engine of its own, whose tensors may have any layout.

        The runs follow each other inside one CUDA graph, as layers do in a network. ``config`` sets repeats
        and limits; the default is quick.
        """
        if (block.signature, widths) in self._coming:
            self._build_ahead(block.signature, widths)
        ahead = self._prebuilt.pop((block.signature, widths), None)
        if isinstance(ahead, Exception):
            raise ahead
        onnx_file = self._written(self._models.model(block, widths)) if ahead is None else None
        timing: dict[str, Any] = {**ROW_TIMING, "graph": self.graph_replay}
        if config is not None:
            timing |= {
                "min_repeats": config.min_repeats, "max_repeats": config.max_repeats, "warmup_ms": config.warmup_ms,
                "budget_ms": config.budget_ms, "spread_limit": config.spread_limit, "attempts": config.attempts,
            }  # fmt: skip
        with self._measurable(onnx_file, ahead) as key:
            return BlockLatency(measurement(self.ask("measure", key=key, timing=timing)["measured"]))

    def expect_blocks(self, blocks: Sequence[Block]) -> None:
        """Export the templates that these blocks need, many at once."""
        self._models.expect(blocks)

    def prepare_rows(self, rows: Sequence[tuple[Block, tuple[int, ...]]]) -> None:
        """Note which rows come next, so that several builders can build ahead of the measurement."""
        if self.builders > 1:
            self._coming = {(block.signature, point): block for block, point in rows}

    def _build_ahead(self, signature: str, widths: tuple[int, ...]) -> None:
        """Build a row's engine and those of the next rows in parallel, a few for each builder.

        Nothing is measured meanwhile, as builders time kernels on the same GPU. An interrupted run loses at
        most these few engines.
        """
        block, count = self._coming.pop((signature, widths)), _AHEAD * self.builders
        wanted = [((signature, widths), block)]
        wanted += itertools.islice(
            (entry for entry in self._coming.items() if entry[0] not in self._prebuilt), count - 1
        )
        for key, _ in wanted[1:]:
            del self._coming[key]
        workers = [self._worker(number) for number in range(min(self.builders, len(wanted)))]
        jobs = []
        for key, block in wanted:
            try:
                jobs.append((key, self._written(self._models.model(block, key[1]))))
            except Exception as error:  # raised when that row is asked for, which may be later
                self._prebuilt[key] = error
        stopped = threading.Event()

        def build(number: int) -> None:
            for key, onnx_file in jobs[number :: len(workers)]:
                if stopped.is_set():
                    return
                engine = onnx_file.with_suffix(".engine")
                found: Path | Exception = engine
                try:
                    workers[number].ask("build", **self._request(onnx_file, block=True), engine=str(engine))
                except WorkerError as error:
                    found = BackendError(str(error))
                onnx_file.unlink(missing_ok=True)
                self._prebuilt[key] = found

        with ThreadPoolExecutor(len(workers)) as pool:
            try:
                list(pool.map(build, range(len(workers))))
            finally:  # if interrupted: wait for the builds in progress, skip the rest
                stopped.set()

    # ---- engines --------------------------------------------------------------------------------------------

    def _written(self, model: onnx.ModelProto) -> Path:
        file = self.scratch / f"{self.new_key()}.onnx"
        write_model(written_block(model, self.precision), file)
        return file

    def _request(self, onnx_file: Path, block: bool) -> dict[str, Any]:
        options = asdict(replace(self.options, block=block))
        return {"onnx": str(onnx_file), "options": options, "cache": str(self._cache)}

    @contextlib.contextmanager
    def _measurable(self, onnx_file: Path | None, engine: Path | None) -> Iterator[str]:
        """Build a block's ONNX file, or load its engine, under a key; delete both files afterwards."""
        key = self.new_key()
        try:
            if onnx_file is not None:
                self.ask("build", **self._request(onnx_file, block=True), key=key)
            else:
                self.ask("load", engine=str(engine), key=key)
            yield key
        except BackendError:  # free its memory for the next engine
            with contextlib.suppress(BackendError):
                self.ask("unload", key=key)
            raise
        else:
            self.ask("unload", key=key)
        finally:
            for file in (onnx_file, engine, description(engine) if engine else None):
                if file is not None:
                    file.unlink(missing_ok=True)


def reference_outputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Array]:
    """Return a module's outputs in float32 without TF32.

    Runs on the GPU if PyTorch has one: a batch of 256 takes long on a CPU.
    """
    if torch.cuda.is_available():
        try:
            # cuDNN's convolutions use TF32 by default.
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, fp32_precision="ieee"):
                return module_outputs(copy.deepcopy(module).cuda(), tuple(x.cuda() for x in inputs))
        except RuntimeError:  # out of memory, or a device is written into the graph
            pass
        finally:
            torch.cuda.empty_cache()  # free the memory for the builder
    return module_outputs(module, inputs)


def _end(workers: list[Worker], scratch: Path) -> None:
    for worker in workers:
        worker.close()
    workers.clear()
    shutil.rmtree(scratch, ignore_errors=True)
