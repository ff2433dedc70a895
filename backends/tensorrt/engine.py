"""A TensorRT engine file, loaded in the worker of its backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from smcp_fx.backends.base import Array, Engine
from smcp_fx.backends.timing.measuring import Timer


class EngineHost(Protocol):
    """The parts of a backend that an engine needs: a worker to ask, and a folder to pass it arrays."""

    scratch: Path
    graph_replay: bool

    @property
    def generation(self) -> int: ...

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]: ...

    def new_key(self) -> str: ...


class TensorRTEngine(Engine):
    """An engine file, loaded in the worker. Inputs and outputs are float32, whatever types the engine has inside."""

    def __init__(self, backend: EngineHost, file: Path, example_inputs: Sequence[Array] = ()) -> None:
        self._backend, self.file = backend, Path(file)
        self._inputs = list(example_inputs)
        self._key = backend.new_key()
        self._generation = -1
        self.build: dict[str, Any] = {}
        self._load()

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        self._load()
        given, found = (self._backend.scratch / f"{self._key}-{side}.npz" for side in ("in", "out"))
        np.savez(given, *inputs)
        try:
            self._backend.ask("run", key=self._key, inputs=str(given), outputs=str(found))
            with np.load(found, allow_pickle=False) as arrays:
                return [arrays[name] for name in arrays.files]
        finally:
            given.unlink(missing_ok=True)
            found.unlink(missing_ok=True)

    def timer(self, inputs: Sequence[Array] | None = None) -> Timer:
        """Return a function that runs once, as a CUDA graph's replay, and returns the ms between events around it.

        TensorRT's kernels take equally long on all values; ``inputs`` are loaded if given.
        """
        if inputs is not None:
            self.run(inputs)

        def once() -> float:
            self._load()
            return float(
                self._backend.ask("sample", key=self._key, graph=self._backend.graph_replay)["ms"][0]
            )

        return once

    def layers(self, repeats: int = 20) -> list[dict[str, Any]]:
        """Return each engine layer: name, ms, kind, types, and the ONNX nodes that it computes."""
        self._load()
        nodes = self.build.get("nodes")
        layers: list[dict[str, Any]] = self._backend.ask(
            "layers", key=self._key, nodes=nodes, repeats=repeats
        )["layers"]
        return layers

    def reload(self) -> TensorRTEngine:
        return TensorRTEngine(self._backend, self.file, self._inputs)

    def close(self) -> None:
        """Free it in the worker; the file stays."""
        if self._generation == self._backend.generation:
            self._backend.ask("unload", key=self._key)
        self._generation = -1

    def _load(self) -> None:
        if self._generation != self._backend.generation:
            answer = self._backend.ask("load", engine=str(self.file), key=self._key)
            self.build, self._generation = answer["build"], self._backend.generation
