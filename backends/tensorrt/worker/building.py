"""ONNX file to TensorRT engine, by the API of TensorRT 8.5, 8.6, 10 and 11.

Up to 10 a builder flag sets the precision; from 11 networks are strongly typed by the ONNX file. In int8 the
file's quantising nodes select the layers in bytes; the others are in float, up to 10 in fp16 if faster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from .problems import WorkerError, major_minor

PRECISIONS = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "int8": "INT8"}
_FLAGS = {"fp16": ("FP16",), "bf16": ("BF16",), "int8": ("INT8", "FP16")}
#: Layouts that an engine's convolutions use between them; a block reads and writes whichever is fastest.
_LAYOUTS = {
    "fp32": ("LINEAR", "HWC", "CHW32"), "fp16": ("LINEAR", "HWC8"), "bf16": ("LINEAR", "HWC8"),
    "int8": ("LINEAR", "CHW4", "CHW32"),
}  # fmt: skip
_PRODUCTS = ("CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY", "FULLY_CONNECTED")

_NOTHING = type(None)
#: The type of each option in a request, and its name in messages.
_KINDS: dict[str, tuple[Any, str]] = {
    "precision": (str, "text"),
    "batch": ((tuple, _NOTHING), "a list of whole numbers"),
    "workspace_mib": ((int, _NOTHING), "a whole number"),
    "optimization_level": ((int, _NOTHING), "a whole number"),
    "tactic_sources_off": (tuple, "a list of names"),
    **dict.fromkeys(("tf32", "block", "version_compatible", "lean"), (bool, "true or false")),
}


@dataclass(frozen=True)
class BuildOptions:
    """How an engine is built.

    ``batch``: least, usual and largest batch if the ONNX file leaves it open. ``block``: part of a network,
    whose inputs and outputs may have any layout. ``version_compatible``: runs under later TensorRT versions (from
    8.6); ``lean``: the same without the lean runtime in the file, for the tensorrt_lean package.
    ``tactic_sources_off``: libraries not to use ("CUBLAS", "CUBLAS_LT", "CUDNN").
    """

    precision: str = "fp32"
    tf32: bool = False
    batch: tuple[int, int, int] | None = None
    block: bool = False
    workspace_mib: int | None = None
    optimization_level: int | None = None
    version_compatible: bool = False
    lean: bool = False
    tactic_sources_off: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BuildOptions:
        """Return the options of a request; `WorkerError` for unknown ones."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise WorkerError(
                f"this worker knows no build options {', '.join(unknown)[:200]}: use the one of that version"
            )
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        options = cls(**{**values, **lists})
        for name, (kind, told) in _KINDS.items():
            value = getattr(options, name)
            if isinstance(value, bool) is not (kind is bool) or not isinstance(value, kind):
                raise WorkerError(f"{name} {repr(value)[:80]}: must be {told}")
        if not all(isinstance(name, str) for name in options.tactic_sources_off):
            raise WorkerError("tactic_sources_off: must be names")
        if options.precision not in PRECISIONS:
            raise WorkerError(f"precision {options.precision[:80]!r}: choose from {', '.join(PRECISIONS)}")
        batch = options.batch
        if batch is not None and not all(type(size) is int for size in batch):
            raise WorkerError(f"batch {repr(list(batch))[:80]}: give [least, usual, largest], whole numbers")
        if batch is not None and (len(batch) != 3 or sorted(batch) != list(batch) or batch[0] < 1):
            raise WorkerError(f"batch {list(batch)}: give [least, usual, largest], each at least 1")
        return options


class Builder:
    """Builds engines with one TensorRT.

    ``cache``: content of the timing cache, which grows with every build; `learn` merges another one.
    """

    def __init__(self, trt: ModuleType, logger: Any, cache: bytes = b"") -> None:
        if not hasattr(trt, "Builder"):
            raise WorkerError(
                f"{trt.__name__} {trt.__version__} only runs engines; building needs the full package: pip install "
                "tensorrt"
            )
        self._trt, self._logger, self.cache = trt, logger, cache
        self._version = major_minor(trt.__version__)
        self._products = {getattr(trt.LayerType, name) for name in _PRODUCTS if hasattr(trt.LayerType, name)}
        logger.clear()
        try:
            self._builder = trt.Builder(logger)
        except TypeError as error:  # how the bindings report a null pointer
            raise WorkerError(f"TensorRT {trt.__version__} cannot start: {logger.told()}") from error

    def build(self, onnx: Path, options: BuildOptions) -> tuple[Any, dict[str, Any]]:
        """Return the serialised engine and facts about the build; `WorkerError` with TensorRT's message."""
        self._check(options)
        began, notes = time.perf_counter(), list[str]()
        plan, network = self._attempt(onnx, options, options.block)
        if plan is None and options.block:  # some layer accepts only the plain layout
            notes.append("plain layouts: no kernel takes the others")
            plan, network = self._attempt(onnx, options, False)
        if plan is None:
            raise WorkerError(
                f"TensorRT {self._trt.__version__} cannot build {onnx.name}: {self._logger.told()}"
            )
        return plan, {"seconds": time.perf_counter() - began, **network, "notes": notes}

    def learn(self, cache: bytes) -> None:
        """Merge another process's timing cache, if this TensorRT can read it."""
        if not cache or cache == self.cache:
            return
        config = self._builder.create_builder_config()
        own, other = (self._readable(config, content) for content in (self.cache, cache))
        if own is None and other is not None:
            self.cache = cache
        elif other is not None and own.combine(other, False):
            self.cache = bytes(own.serialize())

    def _readable(self, config: Any, cache: bytes) -> Any:
        """Give ``config`` a timing cache of this content and return it; None if damaged or incompatible."""
        found = config.create_timing_cache(cache)
        return found if found is not None and config.set_timing_cache(found, False) else None

    def _check(self, options: BuildOptions) -> None:
        trt, version = self._trt, self._trt.__version__
        if not hasattr(trt.DataType, PRECISIONS[options.precision]):
            raise WorkerError(
                f"TensorRT {version} has no {options.precision}; fp16 it has, bf16 comes with 10"
            )
        if (options.version_compatible or options.lean) and not hasattr(
            trt.BuilderFlag, "VERSION_COMPATIBLE"
        ):
            raise WorkerError(f"version-compatible engines come with TensorRT 8.6; this is {version}")
        if options.optimization_level is not None and self._version < (8, 6):
            raise WorkerError(f"the builder's optimisation level comes with TensorRT 8.6; this is {version}")

    def _attempt(self, onnx: Path, options: BuildOptions, any_layout: bool) -> tuple[Any, dict[str, Any]]:
        trt, builder = self._trt, self._builder
        self._logger.clear()
        flags = 0
        if self._version < (10, 0):
            flags = 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
        network = builder.create_network(flags)
        self._parse(network, onnx)
        config = builder.create_builder_config()
        self._configure(config, options)
        self._set_types(network, config, options)
        if any_layout:
            self._open_layouts(network, options.precision)
        self._add_profile(network, config, options)
        if self._readable(config, self.cache) is None:
            self._readable(config, b"")
        plan = builder.build_serialized_network(network, config)
        if plan is not None:
            self.cache = bytes(config.get_timing_cache().serialize())
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        products = sum(layer.type in self._products for layer in layers)
        told = {"nodes": [layer.name for layer in layers], "products": products}
        return plan, {**told, "quantised": self._quantised(layers)}

    def _quantised(self, layers: Sequence[Any]) -> list[str]:
        """Return the convolutions and products whose data and weights both come from dequantising layers."""
        writers = [layer for layer in layers if layer.type == self._trt.LayerType.DEQUANTIZE]
        written = {layer.get_output(0).name for layer in writers}
        return [
            layer.name
            for layer in layers
            if layer.type in self._products
            and layer.num_inputs > 1
            and {layer.get_input(0).name, layer.get_input(1).name} <= written
        ]

    def _parse(self, network: Any, onnx: Path) -> None:
        if not onnx.exists():
            raise WorkerError(f"there is no ONNX file {onnx}")
        parser = self._trt.OnnxParser(network, self._logger)
        if parser.parse_from_file(str(onnx)):
            return
        told = []
        for index in range(parser.num_errors):
            error = parser.get_error(index)
            where = f"node {error.node()}"
            if self._version >= (10, 0):
                where += f" {error.node_name()!r} ({error.node_operator()})"
            told.append(f"{where}: {error.desc()}")
        raise WorkerError(
            f"TensorRT {self._trt.__version__} cannot read {onnx.name}: {'; '.join(told) or self._logger.told()}. "
            "Replace the operation in the network, or use a newer TensorRT"
        )

    def _configure(self, config: Any, options: BuildOptions) -> None:
        trt = self._trt
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if options.workspace_mib is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        (config.set_flag if options.tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
        if options.version_compatible or options.lean:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.lean:
            config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
        sources = config.get_tactic_sources()
        for name in options.tactic_sources_off:
            if name not in ("CUBLAS", "CUBLAS_LT", "CUDNN", "EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"):
                raise WorkerError(
                    f"there is no tactic source {name!r}; there are CUBLAS, CUBLAS_LT, CUDNN ..."
                )
            # TensorRT 11 no longer has these libraries.
            source = getattr(trt.TacticSource, name, None)
            if source is not None:
                sources &= ~(1 << int(source))
        config.set_tactic_sources(sources)

    def _set_types(self, network: Any, config: Any, options: BuildOptions) -> None:
        trt, wanted = self._trt, getattr(self._trt.DataType, PRECISIONS[options.precision])
        flags = _FLAGS.get(options.precision, ())
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        if options.precision == "int8" and not any(layer.type == trt.LayerType.QUANTIZE for layer in layers):
            if not options.block:  # a network must quantise something, a block may be a pooling
                raise WorkerError(
                    "int8 was asked for, and the ONNX file quantises nothing: it must hold pairs of QuantizeLinear "
                    "and DequantizeLinear. Write it with precision int8"
                )
            flags = _FLAGS["fp16"]
        if self._version >= (11, 0):
            if options.precision == "int8":
                return
            inputs = [network.get_input(index) for index in range(network.num_inputs)]
            kinds = {tensor.dtype for tensor in inputs} & {
                getattr(trt.DataType, name) for name in PRECISIONS.values()
            }
            if kinds and wanted not in kinds:
                raise WorkerError(
                    f"{options.precision} was asked for, and the ONNX file is in {', '.join(k.name for k in kinds)}: "
                    "from TensorRT 11 an engine computes in the types of the file. Export it in that precision"
                )
            return
        for flag in flags:
            config.set_flag(getattr(trt.BuilderFlag, flag))
        if not flags or options.precision == "int8":
            return
        config.set_flag(trt.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)
        for layer in layers:
            if layer.type in self._products:
                layer.precision = wanted

    def _open_layouts(self, network: Any, precision: str) -> None:
        """Let a block read and write tensors in its fastest layout, as layers in a network do."""
        trt = self._trt
        mask = sum(1 << int(getattr(trt.TensorFormat, name)) for name in _LAYOUTS[precision])
        wanted = getattr(trt.DataType, PRECISIONS[precision])
        tensors = [network.get_input(index) for index in range(network.num_inputs)]
        tensors += [network.get_output(index) for index in range(network.num_outputs)]
        for tensor in tensors:
            shape = tuple(tensor.shape)
            # A tensor of few channels is the network's input image, which comes in the plain layout.
            if len(shape) == 4 and shape[1] >= 8 and tensor.dtype == wanted:
                tensor.allowed_formats = mask

    def _add_profile(self, network: Any, config: Any, options: BuildOptions) -> None:
        tensors = [network.get_input(index) for index in range(network.num_inputs)]
        shapes = {tensor.name: tuple(tensor.shape) for tensor in tensors}
        if all(size >= 0 for shape in shapes.values() for size in shape):
            return
        if options.batch is None:
            raise WorkerError(
                f"the ONNX file leaves the batch open ({shapes}): say batch=[least, usual, largest]"
            )
        profile = self._builder.create_optimization_profile()
        for name, shape in shapes.items():
            if any(size < 0 for size in shape[1:]):
                raise WorkerError(
                    f"input {name!r} has shape {shape}: only the first axis, the batch, may be open"
                )
            least, usual, largest = ((size, *shape[1:]) if shape[0] < 0 else shape for size in options.batch)
            profile.set_shape(name, least, usual, largest)
        config.add_optimization_profile(profile)


def make_logger(trt: ModuleType) -> Any:
    """Return a logger that keeps TensorRT's warnings and errors for our messages."""

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[bool, str]] = []

        def log(self, severity: Any, message: str) -> None:
            bad = severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR)
            if bad or severity == trt.ILogger.Severity.WARNING:
                self.lines.append((bad, " ".join(message.split())))
                del self.lines[:-200]

        def clear(self) -> None:
            self.lines.clear()

        def told(self) -> str:
            """Return the errors, or the last warnings if there are none."""
            errors = [line for bad, line in self.lines if bad]
            return (
                "; ".join(dict.fromkeys(errors or [line for _, line in self.lines[-4:]]))
                or "it gives no reason"
            )

    return Logger()
