"""OpenVINO on the CPU: engines with fixed threads, and blocks timed the way they run in a network."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import openvino as ov
from torch import Tensor, nn

from smcp_fx.backends.base import Array, BlockLatency, Engine, Fingerprint, cpu_name, to_arrays
from smcp_fx.backends.checking import compare_outputs, module_outputs, random_inputs
from smcp_fx.backends.onnx.processor import ProcessorBackend
from smcp_fx.backends.openvino.blocks import BLOCK_TIMING, measure_block
from smcp_fx.backends.openvino.overhead import overhead
from smcp_fx.backends.openvino.session import (
    Session,
    check_precision,
    core,
    settings,
    version,
)
from smcp_fx.backends.timing.measuring import Timer, TimingConfig, stopwatch
from smcp_fx.backends.timing.pages import page_settings
from smcp_fx.errors import BackendError, InputError

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block

#: Largest difference from PyTorch's float32 outputs, over their scale: bfloat16 keeps 8 bits, float16 11.
#: INT8's error has no bound; the emitted file's accuracy shows its effect.
TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 8e-2, "int8": math.inf}


class OpenVINOEngine(Engine):
    """A network in OpenVINO: an .xml file with its .bin, an ONNX file, or a serialised ONNX model.

    It is timed on ``example_inputs`` (tensors or arrays); axes that a file leaves open get their sizes.
    """

    def __init__(
        self,
        model: Path | str | bytes,
        example_inputs: Sequence[Tensor | Array] = (),
        threads: int = 1,
        precision: str = "fp32",
    ) -> None:
        self._model = model if isinstance(model, bytes) else Path(model)
        if isinstance(self._model, Path) and not self._model.exists():
            raise InputError(f"there is no file {self._model}")
        self._threads, self._precision = threads, precision
        self.cpu_bound = threads == 1
        self._inputs = [i if not isinstance(i, Tensor) else to_arrays([i])[0] for i in example_inputs]
        shapes = [array.shape for array in self._inputs]
        self._session: Session | None = Session(self._model, threads, precision, shapes=shapes)
        self.input_names, self.output_names = self._session.input_names, self._session.output_names

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        session = self._live()
        session.feed(inputs)
        return session.outputs()

    def timer(self, inputs: Sequence[Array] | None = None) -> Timer:
        """Return a function that runs once and returns the ms it took."""
        session = self._live()
        session.feed(self._inputs if inputs is None else inputs)
        return stopwatch(session.run)

    def reload(self) -> OpenVINOEngine:
        return OpenVINOEngine(self._model, self._inputs, self._threads, self._precision)

    def close(self) -> None:
        self._session = None

    def _live(self) -> Session:
        if self._session is None:
            raise BackendError("this engine is closed")
        return self._session


class OpenVINOBackend(ProcessorBackend):
    """OpenVINO on the CPU with ``threads`` threads.

    ``precision``: "fp32"; "bf16" or "fp16" if the processor has them; or "int8", calibrated on the batches of
    ``calibration``.
    """

    name: ClassVar[str] = "openvino"

    def __init__(
        self, threads: int = 1, precision: str | None = None, calibration: Sequence[Array] = ()
    ) -> None:
        super().__init__(threads, precision, calibration)
        check_precision(self.precision)

    def fingerprint(self) -> Fingerprint:
        """Return processor, version, threads, precision and properties."""
        fixed = (*settings(self.precision), *page_settings(), ("block_timing", BLOCK_TIMING))
        if self.calibrated:
            fixed = (*fixed, self.scheme.setting)
        return Fingerprint(
            backend=self.name,
            device=cpu_name(),
            runtime="OpenVINO",
            version=version(),
            threads=self.threads,
            precision=self.precision,
            settings=tuple(sorted(fixed)),
        )

    def compile(
        self, module: nn.Module, example_inputs: tuple[Tensor, ...], path: Path | str | None = None
    ) -> OpenVINOEngine:
        """Export ``module`` and compile it at the examples' batch.

        ``path``: the ONNX file's (checked); beside it lies OpenVINO's own pair (.xml, .bin), checked, too. Without it
        nothing is written or checked.
        """
        if path is None:
            model, remarks = self._exported(module, example_inputs)
            engine = self.open(model, example_inputs)
        else:
            file = self._written(module, example_inputs, path)
            remarks = self._quantised_file(file)
            with _writing(file, example_inputs) as xml, self.open(xml, example_inputs) as scratch:
                self._compare(scratch, module, example_inputs)
            engine = self.open(file.with_suffix(".xml"), example_inputs)
        engine.remarks = remarks
        return engine

    def full_precision(self) -> OpenVINOBackend | None:
        """Return this backend in float32; None if it is in float32."""
        if self.precision == "fp32":
            return None
        plain = OpenVINOBackend(self.threads)
        plain.writer = self.writer
        return plain

    def files(self, path: Path | str) -> list[Path]:
        return [Path(path), *_pair(Path(path))]

    def run_overhead_ms(self) -> float:
        """Return a run's own cost outside its nodes, in ms."""
        return overhead(self.threads).run_ms

    def block_latency(
        self, block: Block, widths: tuple[int, ...], config: TimingConfig | None = None
    ) -> BlockLatency:
        """Measure ``block`` at ``widths`` inside a small network, by the runtime's performance counts."""
        model = self._models.model(block, widths)
        return measure_block(
            model, self.threads, self.precision, config, block.read_before, block.fed_by, self._for_blocks()
        )

    def open(
        self, model: Path | str | bytes, example_inputs: Sequence[Tensor | Array] = ()
    ) -> OpenVINOEngine:
        """Load an existing file or a serialised model."""
        return OpenVINOEngine(model, example_inputs, self.threads, self.precision)

    def _compare(self, engine: Engine, module: nn.Module, examples: tuple[Tensor, ...]) -> None:
        inputs = random_inputs(examples)
        actual = engine.run(to_arrays(inputs))  # first: the module may write into its inputs
        names = [f"output {index}" for index in range(len(actual))]
        compare_outputs(actual, module_outputs(module, inputs), names, "OpenVINO", TOLERANCES[self.precision])


def _pair(onnx_file: Path) -> tuple[Path, Path]:
    """Return the paths of an ONNX file's pair in OpenVINO's form."""
    return onnx_file.with_suffix(".xml"), onnx_file.with_suffix(".bin")


@contextlib.contextmanager
def _writing(onnx_file: Path, examples: Sequence[Tensor]) -> Iterator[Path]:
    """Write an ONNX file in OpenVINO's form, at the examples' batch; name the pair unless the body fails."""
    scratch = _pair(onnx_file.with_name(f".{onnx_file.stem}.{os.getpid()}.onnx"))
    try:
        try:
            network = core().read_model(onnx_file)
            network.reshape({port: list(x.shape) for port, x in zip(network.inputs, examples, strict=True)})
            ov.save_model(network, scratch[0], compress_to_fp16=False)
        except Exception as error:
            raise BackendError(
                f"OpenVINO {version()} cannot write {onnx_file} in its own form: {error}"
            ) from error
        yield scratch[0]
        for file, name in reversed(list(zip(scratch, _pair(onnx_file), strict=True))):  # weights first
            os.replace(file, name)
    finally:
        for file in scratch:
            file.unlink(missing_ok=True)
