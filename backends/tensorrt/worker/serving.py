"""Answers requests: one dictionary in, one out; over a pipe, one JSON object per line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import PROTOCOL
from .building import Builder, BuildOptions, make_logger
from .device import Device
from .inspecting import count_types, is_reformat, nodes_of, wrong_precision
from .problems import WorkerError, import_tensorrt, major_minor, read_object
from .running import LoadedEngine, Timing

#: The fields of a description that must match before an engine file is loaded.
_FIXED = ("tensorrt", "device", "compute_capability")


class Session:
    """One TensorRT on one GPU, with its loaded engines by key. A request's ``op`` names an operation."""

    def __init__(self, gpu: int = 0, lean: bool = False) -> None:
        self._lean, self._trt = lean, import_tensorrt(lean)
        self._device = Device(gpu)
        self._logger = make_logger(self._trt)
        self._runtime: Any = None
        self._builder: Builder | None = None
        self._engines: dict[str, LoadedEngine] = {}
        self._cache: Path | None = None
        self._about = {"tensorrt": str(self._trt.__version__), **self._device.about(), "protocol": PROTOCOL}
        operations = (
            self.about, self.clocks, self.build, self.load, self.run, self.sample, self.measure, self.layers,
            self.unload,
        )  # fmt: skip
        self.operations: dict[str, Callable[..., dict[str, Any]]] = {op.__name__: op for op in operations}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request: ``{"op": NAME, ...}``; errors are answers too."""
        try:
            given = dict(request)
            operation = self.operations.get(given.pop("op", ""))
            if operation is None:
                raise WorkerError(f"this worker knows no request {request.get('op')!r}")
            return {"ok": True, **operation(**given)}
        except WorkerError as error:
            return {"ok": False, "error": str(error)}
        except Exception as error:  # whatever the bindings raise: the next request may succeed
            return {"ok": False, "error": f"{type(error).__name__}: {error}; {self._logger.told()}"}

    def about(self) -> dict[str, Any]:
        """Return the versions and the device."""
        return dict(self._about)

    def clocks(self) -> dict[str, Any]:
        """Return the present clocks, without changing them."""
        return {"clocks": self._device.clocks()}

    def build(
        self, onnx: str, options: Mapping[str, Any], engine: str | None = None, cache: str | None = None,
        key: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Build an engine and check its precision; write it to ``engine`` and load it as ``key`` if given.

        ``cache``: folder of the timing caches, one per TensorRT version and device.
        """
        asked, source = BuildOptions.from_json(options), Path(onnx)
        builder = self._with_cache(cache)
        before = builder.cache
        plan, made = builder.build(source, asked)
        loaded = LoadedEngine(self._trt, self._device, self._deserialise(plan, "the engine just built"))
        try:
            layers = loaded.layers()
            wrong = wrong_precision(layers, asked.precision, made["quantised"])
            if wrong:
                raise WorkerError(
                    f"{asked.precision} was asked for, and the engine is something else: {wrong}"
                )
            types = count_types(layers)
            if types.get("unknown"):
                made["notes"].append(
                    f"the inspector gives no type for {types['unknown']} convolutions and products"
                )
            if made["products"] and not types:
                made["notes"].append(
                    f"the inspector shows none of the network's {made['products']} convolutions and products: what "
                    "they compute in is unknown"
                )
            record = {
                **{name: self._about[name] for name in (*_FIXED, "driver", "protocol")},
                "onnx": source.name,
                "onnx_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
                "options": dict(options),
                "types": types,
                "tf32": "on" if asked.tf32 else "off",
                "reformats": sum(map(is_reformat, layers)),
                # Reading the clocks takes longer than measuring some blocks.
                "clocks": self._device.clocks() if engine is not None and not asked.block else None,
                "engine_bytes": plan.nbytes,
                **made,
                **loaded.describe(),
            }
            if engine is not None:
                _write(Path(engine), memoryview(plan))
                _write(description(engine), json.dumps(record, indent=1).encode())
            if builder.cache != before and self._cache is not None:
                if self._cache.exists():  # other builders write it, too
                    builder.learn(self._cache.read_bytes())
                _write(self._cache, builder.cache)
        except BaseException:
            loaded.close()
            raise
        if key is None:
            loaded.close()
        else:
            self._keep(key, loaded)
        return {"build": record}

    def load(self, engine: str, key: str, batch: int | None = None) -> dict[str, Any]:
        """Load an engine file as ``key``; refuse one that is cut off, or of another device or version."""
        path = Path(engine)
        if not path.is_file():
            raise WorkerError(f"there is no engine file {path}")
        plan, record = path.read_bytes(), _description_of(path)
        if record:
            self._refuse_foreign(path, record)
            if record.get("engine_bytes") not in (None, len(plan)):
                raise WorkerError(
                    f"{path} has {len(plan)} bytes, its description says {record['engine_bytes']}: it was cut off or "
                    "changed. Copy both files again"
                )
        loaded = LoadedEngine(self._trt, self._device, self._deserialise(plan, str(path)), batch)
        self._keep(key, loaded)
        return {"engine": loaded.describe(), "build": record}

    def _refuse_foreign(self, path: Path, record: Mapping[str, Any]) -> None:
        """Raise `WorkerError` if an engine is of another device, or of a version that does not run here."""
        options, source = record.get("options") or {}, record.get("onnx", "its ONNX file")
        portable = options.get("version_compatible") or options.get("lean")
        if self._lean and not portable:
            raise WorkerError(
                f"the engine {path} is for the TensorRT that built it, and tensorrt_lean runs version-compatible "
                f"ones only: build it from {source} with --version-compatible or --lean"
            )
        fixed = list(_FIXED)
        if portable and major_minor(str(record.get("tensorrt"))) <= major_minor(self._about["tensorrt"]):
            fixed.remove("tensorrt")  # it runs under later versions
        other = [
            f"{k} {record.get(k)}, here {self._about[k]}" for k in fixed if record.get(k) != self._about[k]
        ]
        if other:
            raise WorkerError(
                f"the engine {path} was built for another device or version ({'; '.join(other)}): engines are "
                f"not portable. Build it here from {source}"
            )

    def run(self, key: str, inputs: str, outputs: str) -> dict[str, Any]:
        """Run an engine on the arrays of a .npz file and write its outputs to another."""
        with np.load(inputs, allow_pickle=False) as arrays:
            found = self._engine(key).run([arrays[name] for name in arrays.files])
        np.savez(outputs, *found)
        return {}

    def sample(self, key: str, repeats: int = 1, graph: bool = True, inner: int = 1) -> dict[str, Any]:
        """Return the ms of single runs."""
        return {"ms": self._engine(key).sample(repeats, graph, inner)}

    def measure(self, key: str, timing: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the median and quartiles of an engine's latency."""
        return {"measured": self._engine(key).measure(Timing(**(timing or {})))}

    def layers(self, key: str, nodes: list[str] | None = None, repeats: int = 20) -> dict[str, Any]:
        """Return each layer with its time, type and the ONNX nodes (of ``nodes``) that it computes."""
        engine = self._engine(key)
        told = {str(layer.get("Name", "")): layer for layer in engine.layers()}
        found = []
        for name, ms in engine.layer_times(repeats):
            layer = told.get(name, {"Name": name})
            found.append({
                "name": name, "ms": ms, "kind": layer.get("LayerType"), "reformat": is_reformat(layer),
                "types": count_types([layer]), "nodes": nodes_of(layer, nodes or []),
                "tactic": layer.get("TacticName"),
            })  # fmt: skip
        return {"layers": found}

    def unload(self, key: str) -> dict[str, Any]:
        """Free an engine; one that is not loaded is no error."""
        engine = self._engines.pop(key, None)
        if engine is not None:
            engine.close()
        return {}

    def _keep(self, key: str, engine: LoadedEngine) -> None:
        self.unload(key)
        self._engines[key] = engine

    def _engine(self, key: str) -> LoadedEngine:
        if key not in self._engines:
            raise WorkerError(f"no engine {key!r} is loaded")
        return self._engines[key]

    def _with_cache(self, folder: str | None) -> Builder:
        about = self._about
        if folder is not None and self._cache is None:
            name = "-".join([about["tensorrt"], about["device"], about["compute_capability"]])
            self._cache = (
                Path(folder) / f"timing-{''.join(c if c.isalnum() or c in '.-' else '_' for c in name)}.cache"
            )
        if self._builder is None:
            known = self._cache.read_bytes() if self._cache is not None and self._cache.exists() else b""
            self._builder = Builder(self._trt, self._logger, known)
        return self._builder

    def _deserialise(self, plan: Any, what: str) -> Any:
        self._logger.clear()
        if self._runtime is None:
            try:
                self._runtime = self._trt.Runtime(self._logger)
            except TypeError as error:
                raise WorkerError(f"TensorRT cannot start: {self._logger.told()}") from error
            # Version-compatible engines carry a runtime.
            if hasattr(self._runtime, "engine_host_code_allowed"):
                self._runtime.engine_host_code_allowed = True
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise WorkerError(
                f"TensorRT {self._about['tensorrt']} on {self._about['device']} cannot load {what}: "
                f"{self._logger.told()}. An engine runs on the device and version it was built with: build it again"
            )
        return engine


def description(engine: Path | str) -> Path:
    """Return the path of the description beside an engine."""
    path = Path(engine)
    return path.with_name(f"{path.name}.json")


def _description_of(engine: Path) -> dict[str, Any]:
    """Return the description beside an engine; empty if there is none."""
    file = description(engine)
    if not file.exists():
        return {}
    record = read_object(file, "copy it again, or delete it")
    if not isinstance(record.get("options", {}), dict):
        raise WorkerError(f"{file} is not an engine's description: copy it again, or delete it")
    return record


def _write(path: Path, content: Any) -> None:
    """Write a scratch file and rename it, so that ``path`` is complete or unchanged."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # report the first error
            part.unlink()
        raise WorkerError(f"cannot write {path}: {error.strerror or error}; free space there") from error


def serve(gpu: int = 0, lean: bool = False) -> int:
    """Answer requests from stdin on stdout until stdin ends; the libraries' output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    session: Session | None = None
    for line in sys.stdin:
        try:
            if session is None:
                session = Session(gpu, lean)
            found = session.answer(json.loads(line))
        except (RecursionError, ValueError) as error:
            found = {"ok": False, "error": f"the request is not JSON: {error}"}
        except WorkerError as error:  # without TensorRT or a GPU every answer says so
            found = {"ok": False, "error": str(error)}
        print(json.dumps(found), file=answers, flush=True)
    return 0
