"""ONNX Runtime: engines with pinned threads, and blocks timed the way they run in a network. CPU or CUDA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnxruntime as ort
from torch import Tensor, nn

from smcp_fx.backends.base import (
    Array,
    BlockLatency,
    Engine,
    Fingerprint,
    cpu_name,
    gpu_name,
    to_arrays,
)
from smcp_fx.backends.onnx.context import random_feed
from smcp_fx.backends.onnx.processor import ProcessorBackend
from smcp_fx.backends.onnxruntime.blocks import BLOCK_TIMING, measure_block
from smcp_fx.backends.onnxruntime.overhead import overhead
from smcp_fx.backends.onnxruntime.session import (
    PROVIDERS,
    bound_run,
    check_device,
    create_session,
    run_session,
    session_options,
    settings,
)
from smcp_fx.backends.timing.measuring import QUICK, Timer, TimingConfig, stopwatch
from smcp_fx.backends.timing.pages import page_settings
from smcp_fx.errors import BackendError, InputError

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block


class OnnxRuntimeEngine(Engine):
    """An ONNX file (or a serialised model) in ONNX Runtime.

    It is timed on ``example_inputs`` (tensors or arrays); without them, `latency` needs inputs.
    """

    def __init__(
        self,
        model: Path | str | bytes,
        example_inputs: Sequence[Tensor | Array] = (),
        threads: int = 1,
        spinning: bool = True,
        device: str = "cpu",
    ) -> None:
        self._model = model if isinstance(model, bytes) else Path(model)
        if isinstance(self._model, Path) and not self._model.exists():
            raise InputError(f"there is no ONNX file {self._model}")
        self._threads, self._spinning, self._device = threads, spinning, device
        self.cpu_bound = threads == 1 and device == "cpu"
        self._inputs = [i if isinstance(i, np.ndarray) else to_arrays([i])[0] for i in example_inputs]
        self._session: ort.InferenceSession | None = create_session(
            self._model, session_options(threads, spinning), device
        )
        self.input_names = [value.name for value in self._session.get_inputs()]
        self._halves = {value.name for value in self._session.get_inputs() if value.type == "tensor(float16)"}
        self.output_names = [value.name for value in self._session.get_outputs()]

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        return run_session(self._live(), self._feed(inputs))

    def timer(self, inputs: Sequence[Array] | None = None) -> Timer:
        """Return a function that runs once and returns the ms it took.

        On CUDA inputs and outputs stay on the device, and a run ends when the device is done.
        """
        session, feed = self._live(), self._feed(self._inputs if inputs is None else inputs)
        if self._device != "cpu":
            return stopwatch(bound_run(session, feed, self._device))
        return stopwatch(lambda: session.run(None, feed))

    def reload(self) -> OnnxRuntimeEngine:
        return OnnxRuntimeEngine(self._model, self._inputs, self._threads, self._spinning, self._device)

    def close(self) -> None:
        self._session = None

    def _live(self) -> ort.InferenceSession:
        if self._session is None:
            raise BackendError("this engine is closed")
        return self._session

    def _feed(self, inputs: Sequence[Array]) -> dict[str, Array]:
        if len(inputs) != len(self.input_names):
            raise InputError(f"the network has {len(self.input_names)} inputs, {len(inputs)} were given")
        return {
            name: array.astype(np.float16) if name in self._halves else array
            for name, array in zip(self.input_names, inputs, strict=True)
        }


class OnnxRuntimeBackend(ProcessorBackend):
    """ONNX Runtime on the CPU with ``threads`` intra-op threads (1: the figures repeat best), or on CUDA.

    ``precision``: "fp32" (the network's own), or "int8" on the CPU, calibrated on the batches of ``calibration``.
    """

    name: ClassVar[str] = "onnxruntime"

    def __init__(
        self,
        threads: int = 1,
        spinning: bool = True,
        opset: int | None = None,
        device: str = "cpu",
        precision: str | None = None,
        calibration: Sequence[Array] = (),
    ) -> None:
        super().__init__(threads, precision, calibration, opset)
        if precision not in (None, "fp32", "int8") or (precision == "int8" and device != "cpu"):
            raise InputError(
                f"precision {precision!r}: ONNX Runtime runs what this library writes for it in fp32, and on "
                "processors in int8 (its kernels for them compute in no half precision)"
            )
        check_device(device)
        self.spinning, self.device = spinning, device

    def fingerprint(self) -> Fingerprint:
        """Return processor or GPU, version, threads and session settings."""
        fixed = settings(self.spinning)
        if self.device == "cuda":
            name, driver = gpu_name()
            fixed = (*fixed, ("driver", driver), ("provider", PROVIDERS["cuda"]))
        else:
            name, fixed = cpu_name(), (*fixed, *page_settings(), ("block_timing", BLOCK_TIMING))
        if self.calibrated:
            fixed = (*fixed, self.scheme.setting)
        return Fingerprint(
            backend=self.name,
            device=name,
            runtime="ONNX Runtime",
            version=str(ort.__version__),
            threads=self.threads,
            precision="int8" if self.calibrated else "as in the network",
            settings=tuple(sorted(fixed)),
        )

    def compile(
        self, module: nn.Module, example_inputs: tuple[Tensor, ...], path: Path | str | None = None
    ) -> OnnxRuntimeEngine:
        """Export ``module`` (checked, to ``path``; or unchecked in memory), quantise it for INT8, and load it."""
        if path is None:
            model, remarks = self._exported(module, example_inputs)
            engine = self.open(model, example_inputs)
        else:
            remarks = self._quantised_file(self._written(module, example_inputs, path))
            engine = self.open(path, example_inputs)
        engine.remarks = remarks
        return engine

    def full_precision(self) -> OnnxRuntimeBackend | None:
        """Return this backend in float32; None if it is in float32."""
        if not self.calibrated:
            return None
        plain = OnnxRuntimeBackend(self.threads, self.spinning, self.opset)
        plain.writer = self.writer
        return plain

    def open(
        self, model: Path | str | bytes, example_inputs: Sequence[Tensor | Array] = ()
    ) -> OnnxRuntimeEngine:
        """Load an existing file or a serialised model."""
        return OnnxRuntimeEngine(model, example_inputs, self.threads, self.spinning, self.device)

    def run_overhead_ms(self) -> float | None:
        """Return a run's own cost outside its nodes, in ms; None on CUDA, where blocks include it."""
        if self.device != "cpu":
            return None
        return overhead(self.threads, self.spinning).run_ms

    def fading_half_ms(self) -> float:
        """Return after how many ms half of the outer cache is replaced; inf if it stays, and on CUDA."""
        return super().fading_half_ms() if self.device == "cpu" else math.inf

    def require_quiet(self) -> None:
        """Raise `MachineBusyError` unless this thread has a core most of the time; CUDA is always quiet."""
        if self.device == "cpu":
            super().require_quiet()

    def block_latency(
        self, block: Block, widths: tuple[int, ...], config: TimingConfig | None = None
    ) -> BlockLatency:
        """Measure ``block`` at ``widths``: with the profiler, inside a small network; on CUDA, alone."""
        model = self._models.model(block, widths)
        if self.device != "cpu":
            inputs = random_feed(model)
            with self.open(model.SerializeToString(), tuple(inputs.values())) as engine:
                return BlockLatency(engine.latency(config=config or QUICK))
        return measure_block(
            model, self.threads, self.spinning, config, block.read_before, block.fed_by, self._for_blocks()
        )
