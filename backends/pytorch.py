"""PyTorch itself as a runtime: eager or `torch.compile`, on the CPU or on a CUDA device.

On CUDA a run is timed by events, as a replay of a captured graph unless that is switched off. A block is timed as
several runs in a row between two events, as layers follow each other in a network.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from smcp_fx.backends.base import Array, Backend, BlockLatency, Engine, Fingerprint, cpu_name, to_arrays
from smcp_fx.backends.timing.measuring import (
    Measurement,
    Timer,
    TimingConfig,
    measure_timers,
    stopwatch,
)
from smcp_fx.backends.timing.pages import page_settings
from smcp_fx.backends.timing.quiet import require_core
from smcp_fx.errors import BackendError, InputError

if TYPE_CHECKING:
    from smcp_fx.blocks.sharing import Block

#: The types that modules and inputs are converted to; other precisions leave them unchanged.
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: How long a block's runs in a row take together (ms), the most runs in a row, and how to measure a row.
#: Chosen, not measured.
_IN_A_ROW_MS, _MOST_IN_A_ROW = 2.0, 50
_ROW = TimingConfig(min_repeats=10, max_repeats=40, budget_ms=60.0, warmup_ms=10.0)


class TorchEngine(Engine):
    """A copy of a module in eval mode, ready to run on ``device``.

    In half precision the copy and its inputs are converted, and on CUDA images lie with their channels last, as
    tensor cores read them. Outputs are then float32.
    """

    def __init__(
        self,
        module: nn.Module,
        example_inputs: Sequence[Tensor],
        *,
        device: str = "cpu",
        threads: int = 1,
        compiled: bool = False,
        graph_replay: bool = True,
        precision: str | None = None,
    ) -> None:
        self._device, self._type = torch.device(device), _TYPES.get(precision or "")
        self._options: dict[str, Any] = {
            "device": device, "threads": threads, "compiled": compiled, "graph_replay": graph_replay,
            "precision": precision,
        }  # fmt: skip
        self._threads, self._graph_replay = threads, graph_replay
        self.cpu_bound = self._device.type == "cpu" and threads == 1
        self._module: nn.Module | None = copy.deepcopy(module).eval().to(self._device, self._type)
        if _channels_last(self._device, self._type):
            for parameter in self._module.parameters():
                parameter.data = _laid_out(parameter.data)
        self._call: Callable[..., Any] = torch.compile(self._module) if compiled else self._module
        self._inputs = [self._given(tensor.detach()) for tensor in example_inputs]

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        with self._running():
            outputs = self._forward([self._given(torch.as_tensor(array)) for array in inputs])
        tensors = [o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, Tensor)]
        return to_arrays([o.float() if o.dtype == self._type else o for o in tensors])

    def timer(self, inputs: Sequence[Array] | None = None) -> Timer:
        """Return a function that runs once and returns the ms it took, the device synchronised."""
        tensors = self._inputs if inputs is None else [self._given(torch.as_tensor(a)) for a in inputs]
        if self._device.type == "cuda":
            return self._cuda_timer(tensors)

        run = stopwatch(lambda: self._forward(tensors))

        def once() -> float:
            with self._running():
                return run()

        return once

    def in_a_row(self, config: TimingConfig) -> Measurement:
        """Measure one of several runs in a row on CUDA; a single run would include its graph's launch."""
        alone = self._between_events(lambda: self._forward(self._inputs))
        ms = float(np.median([alone() for _ in range(5)]))
        inner = int(np.clip(np.ceil(_IN_A_ROW_MS / max(ms, 1e-4)), 1, _MOST_IN_A_ROW))
        together = self._cuda_timer(self._inputs, inner)
        return measure_timers([lambda: together() / inner], config)[0]

    def reload(self) -> TorchEngine:
        """Return a new engine with a copy of the module."""
        if self._module is None:
            raise BackendError("this engine is closed")
        return TorchEngine(self._module, self._inputs, **self._options)

    def close(self) -> None:
        self._module = None

    def _given(self, tensor: Tensor) -> Tensor:
        """Return an input on the device, in the engine's type and layout."""
        tensor = tensor.to(self._device, self._type if tensor.is_floating_point() else None)
        return _laid_out(tensor) if _channels_last(self._device, self._type) else tensor

    def _forward(self, inputs: Sequence[Tensor]) -> Any:
        if self._module is None:
            raise BackendError("this engine is closed")
        try:
            return self._call(*inputs)
        except (RuntimeError, TypeError) as error:
            shapes = [tuple(tensor.shape) for tensor in inputs]
            raise BackendError(f"the module failed on inputs of shapes {shapes}: {error}") from error

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Inference mode, with this engine's number of threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(before)

    def _cuda_timer(self, inputs: Sequence[Tensor], inner: int = 1) -> Timer:
        """Return a function that returns the ms of ``inner`` runs in a row."""

        def run() -> None:
            for _ in range(inner):
                self._forward(inputs)

        return self._between_events(self._captured(run) if self._graph_replay else run)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a replay of a CUDA graph of ``run``."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side), self._running():
            for _ in range(3):  # a capture must not meet lazy initialisation
                run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with self._running(), torch.cuda.graph(graph):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def _between_events(self, run: Callable[[], None]) -> Timer:
        def once() -> float:
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            with self._running():
                start.record()
                run()
                end.record()
            torch.cuda.synchronize(self._device)
            return float(start.elapsed_time(end))

        return once


class TorchBackend(Backend):
    """PyTorch on ``device`` ("cpu", "cuda", "cuda:1"), eager or ``compiled``; ``threads`` on the CPU.

    ``precision``: "fp16" or "bf16" converts compiled networks; otherwise they keep their own precision.
    """

    name: ClassVar[str] = "torch"

    def __init__(
        self,
        device: str = "cpu",
        threads: int = 1,
        compiled: bool = False,
        graph_replay: bool = True,
        precision: str | None = None,
    ) -> None:
        if precision not in (None, "fp32", *_TYPES):
            raise InputError(f"precision {precision!r}: PyTorch runs networks here in fp32, fp16 or bf16")
        if threads < 1:
            raise InputError(f"threads = {threads}: at least 1 is needed")
        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise BackendError(f"PyTorch knows no device {device!r}; use 'cpu' or 'cuda'") from error
        if self._device.type not in ("cpu", "cuda"):
            raise BackendError(f"latency on {device!r} is not supported; use 'cpu' or 'cuda'")
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise BackendError(
                f"device {device!r}: PyTorch {torch.__version__} finds no CUDA device here; "
                "install a driver and a CUDA build of torch, or use 'cpu'"
            )
        self.threads, self.compiled, self.graph_replay = threads, compiled, graph_replay
        self.precision = precision if precision in _TYPES else None
        self._run_ms: float | None = None

    def fingerprint(self) -> Fingerprint:
        """Return the device, the version, threads, and how the network is run."""
        settings = {"mode": "compile" if self.compiled else "eager"}
        device = cpu_name()
        if self._device.type == "cpu":
            settings |= dict(page_settings())
        else:
            device = torch.cuda.get_device_name(self._device)
            settings |= {
                "graph_replay": "on" if self.graph_replay else "off",
                "tf32": str(torch.backends.cudnn.allow_tf32).lower(),
                "cuda": str(torch.version.cuda),
                "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
                "block_timing": "runs in a row",
            }
            if _channels_last(self._device, _TYPES.get(self.precision or "")):
                settings["layout"] = "channels last"
        return Fingerprint(
            backend=self.name,
            device=device,
            runtime="PyTorch",
            version=str(torch.__version__),
            threads=self.threads,
            precision=self.precision or "as in the network",
            settings=tuple(sorted(settings.items())),
        )

    def require_quiet(self) -> None:
        """Require a core that this thread has most of the time; on CUDA require nothing."""
        if self._device.type == "cpu":
            require_core()

    def full_precision(self) -> TorchBackend | None:
        """Return this backend without a precision of its own; None if it has none."""
        if self.precision is None:
            return None
        return TorchBackend(str(self._device), self.threads, self.compiled, self.graph_replay)

    def cache_bytes(self) -> int:
        """Return the size of the GPU's L2 cache; on a CPU as for every backend."""
        if self._device.type == "cpu":
            return super().cache_bytes()
        return int(torch.cuda.get_device_properties(self._device).L2_cache_size)

    def run_overhead_ms(self) -> float | None:
        """Return a CUDA run's cost beyond its layers in ms, measured on one small layer; None on a CPU."""
        if self._device.type == "cpu":
            return None
        if self._run_ms is None:
            engine = self.compile(nn.ReLU(), (torch.ones(1, 8, 1, 1),))
            with engine:
                alone, row = engine.latency(config=_ROW), engine.in_a_row(_ROW)
            self._run_ms = max(alone.median_ms - row.median_ms, 0.0)
        return self._run_ms

    def block_latency(
        self, block: Block, widths: tuple[int, ...], config: TimingConfig | None = None
    ) -> BlockLatency:
        """Measure ``block`` at ``widths``: alone on a CPU, as runs in a row on CUDA."""
        if self._device.type == "cpu":
            return super().block_latency(block, widths, config)
        engine = self.compile(*block.build(widths))
        with engine:
            return BlockLatency(engine.in_a_row(config or _ROW))

    def files(self, path: Path | str) -> list[Path]:
        """Return none: PyTorch loads no file."""
        return []

    def compile(
        self, module: nn.Module, example_inputs: tuple[Tensor, ...], path: Path | str | None = None
    ) -> TorchEngine:
        """Copy ``module`` to the device. PyTorch loads no file: ``path`` is left alone."""
        return TorchEngine(
            module,
            example_inputs,
            device=str(self._device),
            threads=self.threads,
            compiled=self.compiled,
            graph_replay=self.graph_replay,
            precision=self.precision,
        )


def _channels_last(device: torch.device, kind: torch.dtype | None) -> bool:
    return device.type == "cuda" and kind is not None


def _laid_out(tensor: Tensor) -> Tensor:
    """Return images and kernels with their channels last, other tensors unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
