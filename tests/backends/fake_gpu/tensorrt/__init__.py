"""A stand-in for TensorRT's bindings, of the version in FAKE_TENSORRT; engines are ONNX files run by ONNX Runtime.

Enumerations, and which methods there are, come from the record of the real bindings (tensorrt_names.json). An
engine's time follows from its multiplications. FAKE_FAULT names what goes wrong: ``crash:TEXT`` dies building a file
that has a node named so, ``hang:TEXT`` never ends, ``fp32`` computes in float32 whatever is asked, ``none:TEXT``
gives no engine, ``layouts`` takes plain layouts only, ``fused`` tells nothing of layers, ``quotes:NAME`` of one tells
what is no valid JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from cuda.bindings import runtime as cudart

__version__ = os.environ.get("FAKE_TENSORRT", "8.5.3.1")
_RECORD = json.loads((Path(__file__).parents[2] / "tensorrt_names.json").read_text())[__version__]
_MAJOR = int(__version__.split(".")[0])
_FAULT = os.environ.get("FAKE_FAULT", "")


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


class _Member:
    """A pybind11 enumeration's member: hashable, has a name, turns into an int."""

    def __init__(self, kind: str, name: str, value: int) -> None:
        self.kind, self.name, self.value = kind, name, value

    def __int__(self) -> int:
        return self.value


def _enum(name: str) -> Any:
    return type(name, (), {key: _Member(name, key, value) for key, value in _RECORD[name].items()})


BuilderFlag, NetworkDefinitionCreationFlag = _enum("BuilderFlag"), _enum("NetworkDefinitionCreationFlag")
ProfilingVerbosity, MemoryPoolType = _enum("ProfilingVerbosity"), _enum("MemoryPoolType")
TacticSource, TensorFormat, TensorIOMode = _enum("TacticSource"), _enum("TensorFormat"), _enum("TensorIOMode")
LayerInformationFormat, DataType, LayerType = (
    _enum("LayerInformationFormat"),
    _enum("DataType"),
    _enum("LayerType"),
)
_KINDS = {1: "FLOAT", 10: "HALF", 16: "BF16", 6: "INT32", 7: "INT64", 9: "BOOL", 3: "INT8"}
_NUMPY = {
    "FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_, "INT8": np.int8,
}  # fmt: skip
_WORDS = {
    "FLOAT": "Row major linear FP32",
    "HALF": "Channel major FP16 format where channel % 8 == 0",
    "BF16": "BF16",
    "INT8": "Thirty-two wide channel vectorized row major Int8 format",
}
_TYPES = {
    "Conv": "CONVOLUTION",
    "ConvTranspose": "DECONVOLUTION",
    "Gemm": "FULLY_CONNECTED",
    "MatMul": "MATRIX_MULTIPLY",
    "Relu": "ACTIVATION",
    "MaxPool": "POOLING",
    "GlobalAveragePool": "REDUCE",
    "Add": "ELEMENTWISE",
    "QuantizeLinear": "QUANTIZE",
    "DequantizeLinear": "DEQUANTIZE",
}


def _as_recorded(cls: Any) -> Any:
    """Take out what the real class of this version has not; fail where it never had it."""
    for name in [n for n in vars(cls) if not n.startswith("_")]:
        if name not in _RECORD[cls.__name__]:
            delattr(cls, name)
    return cls


class ILogger:
    class Severity:
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None: ...


class IProfiler:
    def __init__(self) -> None: ...


class Logger(ILogger): ...


@_as_recorded
class ITensor:
    def __init__(self, value: Any, shape: tuple[int, ...], kind: str) -> None:
        self.name, self.shape = value.name, shape
        self.dtype = getattr(DataType, kind)
        self.allowed_formats = 1


@_as_recorded
class ILayer:
    def __init__(self, node: Any, kind: str) -> None:
        self.name, self.type, self.node = node.name, getattr(LayerType, kind, None), node
        self.asked: Any = None

    num_inputs = property(lambda self: len(self.node.input))

    def get_input(self, index: int) -> Any:
        return SimpleNamespace(name=self.node.input[index])

    def get_output(self, index: int) -> Any:
        return SimpleNamespace(name=self.node.output[index])

    @property
    def precision(self) -> Any:
        return self.asked

    @precision.setter
    def precision(self, value: Any) -> None:
        self.asked = value


@_as_recorded
class INetworkDefinition:
    def __init__(self) -> None:
        self.model: Any = None
        self.layers: list[ILayer] = []
        self.inputs: list[ITensor] = []
        self.outputs: list[ITensor] = []

    num_layers = property(lambda self: len(self.layers))
    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_layer(self, index: int) -> ILayer:
        return self.layers[index]

    def get_input(self, index: int) -> ITensor:
        return self.inputs[index]

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]


@_as_recorded
class ParserError:
    def __init__(self, index: int, node: Any) -> None:
        self._index, self._node = index, node

    def node(self) -> int:
        return self._index

    def node_name(self) -> str:
        return str(self._node.name)

    def node_operator(self) -> str:
        return str(self._node.op_type)

    def desc(self) -> str:
        return f"No importer registered for op: {self._node.op_type}"


@_as_recorded
class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: Any) -> None:
        self._network, self._errors = network, list[ParserError]()

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def parse_from_file(self, path: str) -> bool:
        model = onnx.load(path)
        assert _MAJOR >= 10 or model.opset_import[0].version <= 17, "opset"
        network = self._network
        for index, node in enumerate(model.graph.node):
            if node.op_type in ("Det", "Unique"):
                self._errors.append(ParserError(index, node))
            kind = _TYPES.get(node.op_type, "SHUFFLE")
            network.layers.append(ILayer(node, kind if hasattr(LayerType, kind) else "MATRIX_MULTIPLY"))
        for value, side in [(v, network.inputs) for v in model.graph.input] + [
            (v, network.outputs) for v in model.graph.output
        ]:
            kind = value.type.tensor_type
            shape = tuple(d.dim_value or -1 for d in kind.shape.dim)
            side.append(ITensor(value, shape, _KINDS[kind.elem_type]))
        network.model = model
        return not self._errors


@_as_recorded
class IOptimizationProfile:
    def set_shape(self, name: str, least: Any, usual: Any, largest: Any) -> None:
        self.__dict__.setdefault("shapes", {})[name] = [list(least), list(usual), list(largest)]


@_as_recorded
class ITimingCache:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def serialize(self) -> bytes:
        return self._content

    def combine(self, input_cache: ITimingCache, ignore_mismatch: bool) -> bool:
        new = [entry for entry in input_cache._content.split(b";") if entry not in self._content.split(b";")]
        self._content += b"".join(entry + b";" for entry in new)
        return True


@_as_recorded
class IHostMemory(bytes):
    nbytes = property(lambda self: len(self))


@_as_recorded
class IBuilderConfig:
    def __init__(self) -> None:
        self._flags, self._sources, self._cache, self._profiles = (
            {BuilderFlag.TF32},
            0b11111,
            ITimingCache(b""),
            [],
        )
        self._workspace: int | None = None
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY

    def set_flag(self, flag: Any) -> None:
        self._flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag)

    def get_flag(self, flag: Any) -> bool:
        return flag in self._flags

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self._workspace = size

    def get_tactic_sources(self) -> int:
        return self._sources

    def set_tactic_sources(self, sources: int) -> bool:
        self._sources = sources
        return True

    def create_timing_cache(self, content: bytes) -> ITimingCache | None:
        return None if content.startswith(b"damaged") else ITimingCache(content)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        assert isinstance(cache, ITimingCache)
        if cache._content.startswith(b"of another GPU"):
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache:
        return self._cache

    def add_optimization_profile(self, profile: Any) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1


@_as_recorded
class Builder:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        assert flags == (1 if _MAJOR < 10 else 0)
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> Any:
        fault, _, text = _FAULT.partition(":")
        graph = network.model.graph
        hit = any(text in node.name for node in graph.node)
        if fault == "crash" and hit:
            os.kill(os.getpid(), signal.SIGKILL)
        while fault == "hang" and hit:
            time.sleep(0.1)
        opened = any(t.allowed_formats != 1 for t in (*network.inputs, *network.outputs))
        if (fault == "none" and hit) or (fault == "layouts" and opened):
            self._logger.log(ILogger.Severity.ERROR, "Could not find any implementation for node")
            return None
        shapes = {} if not config._profiles else vars(config._profiles[0])["shapes"]
        kind = "FLOAT" if _MAJOR < 11 else network.inputs[0].dtype.name
        quantising = any(layer.type is LayerType.QUANTIZE for layer in network.layers)
        assert quantising or not hasattr(BuilderFlag, "INT8") or not config.get_flag(BuilderFlag.INT8), (
            "no scales"
        )
        for flag, name in (("FP16", "HALF"), ("BF16", "BF16")):
            if hasattr(BuilderFlag, flag) and config.get_flag(getattr(BuilderFlag, flag)):
                kind = name
        header = {
            "version": __version__, "gpu": os.environ.get("FAKE_GPU", ""), "shapes": shapes, "opened": opened,
            "kind": "FLOAT" if fault == "fp32" else kind,
            "flags": sorted(f.name for f in config._flags), "sources": config._sources,
            "bytes": _in_bytes(graph) if kind != "FLOAT" or _MAJOR >= 11 else [],
            "asked": [layer.asked.name for layer in network.layers if layer.asked is not None],
        }  # fmt: skip
        cache = config.get_timing_cache()
        cache._content += f"{graph.node[0].name};".encode()
        assert config.profiling_verbosity is ProfilingVerbosity.DETAILED
        return IHostMemory(json.dumps(header).encode() + b"\0" + network.model.SerializeToString())


@_as_recorded
class Runtime:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        header, _, model = bytes(plan).partition(b"\0")
        told = json.loads(header) if header.startswith(b"{") else {}
        later = "VERSION_COMPATIBLE" in told.get("flags", ()) and _number(told["version"]) <= _number(
            __version__
        )
        if not (later or told.get("version") == __version__) or told["gpu"] != os.environ.get("FAKE_GPU", ""):
            self._logger.log(
                ILogger.Severity.ERROR, "The engine plan file is not compatible with this version"
            )
            return None
        return ICudaEngine(told, onnx.load_from_string(model))


_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _in_bytes(graph: Any) -> list[str]:
    """Return the layers that explicit quantisation has compute in bytes: those whose inputs both were quantised."""
    read = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    return [node.name for node in graph.node if node.op_type in _LAYERS and {*node.input[:2]} <= read]


def _work(model: Any) -> dict[str, float]:
    """Return the ms of each node: 1e-7 a weight, and 1e-3 a node that is not fused with the next."""
    sizes = {t.name: float(np.prod(t.dims)) for t in model.graph.initializer}
    fused = ("QuantizeLinear", "DequantizeLinear")
    return {
        node.name: 1e-3 * (node.op_type not in fused) + 1e-7 * sum(sizes.get(i, 0.0) for i in node.input)
        for node in model.graph.node
    }


@_as_recorded
class ICudaEngine:
    def __init__(self, told: dict[str, Any], model: Any) -> None:
        self.told, self.model, self.work = told, model, _work(model)
        self.values = {v.name: v for v in (*model.graph.input, *model.graph.output)}

    num_io_tensors = property(lambda self: len(self.values))
    num_layers = property(lambda self: len(self.model.graph.node))

    def get_tensor_name(self, index: int) -> str:
        return list(self.values)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in {v.name for v in self.model.graph.input} else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d.dim_value or -1 for d in self.values[name].type.tensor_type.shape.dim)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[list[int]]:
        return list(self.told["shapes"][name])

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(DataType, _KINDS[self.values[name].type.tensor_type.elem_type])

    def get_tensor_vectorized_dim(self, name: str) -> int:
        return 1 if self.told["opened"] and len(self.get_tensor_shape(name)) == 4 else -1

    def get_tensor_components_per_element(self, name: str) -> int:
        return 8 if self.get_tensor_vectorized_dim(name) == 1 else -1

    def create_execution_context(self) -> IExecutionContext:
        return IExecutionContext(self)

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self)


@_as_recorded
class EngineInspector:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self.execution_context: Any = None

    def get_engine_information(self, kind: Any) -> str:
        layers = [self.get_layer_information(index, kind) for index in range(self._engine.num_layers)]
        return f'{{"Layers": [{",".join(layers)}], "Bindings": []}}'

    def get_layer_information(self, index: int, kind: Any) -> str:
        word, node = self._engine.told["kind"], self._engine.model.graph.node[index]
        if node.name in self._engine.told["bytes"] and _FAULT != "fp32":
            word = "INT8"
        tensor = {"Name": node.input[0], "Dimensions": [], "Format/Datatype": _WORDS[word]}
        if _MAJOR >= 11:
            del tensor["Format/Datatype"]
            tensor |= {
                "Format": "Channel major",
                "DataType": {"FLOAT": "Float", "HALF": "Half", "INT8": "Int8"}.get(word, word),
            }
        layer = {
            "Name": node.name,
            "LayerType": "CaskConvolution" if node.op_type == "Conv" else node.op_type,
            "Inputs": [tensor],
            "Outputs": [tensor],
            "TacticName": "pretend_kernel",
        }
        if _FAULT == "fused":
            layer = {"Name": node.name, "LayerType": "kgen"}
        if _MAJOR >= 10:
            layer["Metadata"] = f"[ONNX Layer: {node.name}]"
        if _FAULT.startswith("quotes:") and _FAULT[7:] == node.name:
            return json.dumps(layer).replace("[ONNX", '"[ONNX')
        return json.dumps(layer)


@_as_recorded
class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine, self._shapes, self._at = engine, dict[str, tuple[int, ...]](), dict[str, int]()
        self.profiler: Any = None
        self._session: Any = None

    def set_input_shape(self, name: str, shape: Any) -> bool:
        open_batch = self._engine.get_tensor_shape(name)[0] < 0
        if open_batch and not (s := self._engine.told["shapes"][name])[0][0] <= shape[0] <= s[2][0]:
            return False
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        shape = self._shapes.get(name) or self._engine.get_tensor_shape(name)
        batch = next(iter(self._shapes.values()))[0]
        return tuple(batch if size < 0 else size for size in shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._at[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        cudart.enqueue(sum(self._engine.work.values()))
        if self.profiler is not None:
            for name, ms in self._engine.work.items():
                self.profiler.report_layer_time(name, ms)
        elif not self._engine.told["opened"] and cudart.clock.capturing is None:
            self._compute()
        return True

    def _compute(self) -> None:
        if self._session is None:
            options = onnxruntime.SessionOptions()
            if self._engine.told["bytes"]:  # beyond this level its rewrites are wrong for signed bytes
                options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            self._session = onnxruntime.InferenceSession(self._engine.model.SerializeToString(), options)
        feed = {}
        for value in self._session.get_inputs():
            shape, kind = (
                self.get_tensor_shape(value.name),
                _NUMPY[self._engine.get_tensor_dtype(value.name).name],
            )
            array = np.empty(shape, kind)
            ctypes.memmove(array.ctypes.data, self._at[value.name], array.nbytes)
            feed[value.name] = array
        for value, array in zip(self._session.get_outputs(), self._session.run(None, feed), strict=True):
            array = np.ascontiguousarray(array)
            ctypes.memmove(self._at[value.name], array.ctypes.data, array.nbytes)
