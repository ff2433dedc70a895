"""PyTorch itself as a runtime: eager or `torch.compile`, on the CPU or on a CUDA device.

On CUDA a run is timed by events, as a replay of a captured graph unless that is switched off.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smcp_fx.backends.base import Array, Backend, Engine, Fingerprint, cpu_name, to_arrays
from smcp_fx.backends.timing.measuring import Timer, stopwatch
from smcp_fx.backends.timing.pages import page_settings
from smcp_fx.backends.timing.quiet import require_core
from smcp_fx.errors import BackendError, InputError


class TorchEngine(Engine):
    """A copy of a module in eval mode, ready to run on ``device``."""

    def __init__(
        self,
        module: nn.Module,
        example_inputs: Sequence[Tensor],
        *,
        device: str = "cpu",
        threads: int = 1,
        compiled: bool = False,
        graph_replay: bool = True,
    ) -> None:
        self._device = torch.device(device)
        self._threads, self._graph_replay, self._compiled = threads, graph_replay, compiled
        self.cpu_bound = self._device.type == "cpu" and threads == 1
        self._module: nn.Module | None = copy.deepcopy(module).eval().to(self._device)
        self._call: Callable[..., Any] = torch.compile(self._module) if compiled else self._module
        self._inputs = [tensor.detach().to(self._device) for tensor in example_inputs]

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Return the network's outputs, in order."""
        with self._running():
            outputs = self._forward([torch.as_tensor(array).to(self._device) for array in inputs])
        return to_arrays([o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, Tensor)])

    def timer(self, inputs: Sequence[Array] | None = None) -> Timer:
        """Return a function that runs once and returns the ms it took, the device synchronised."""
        given = self._inputs if inputs is None else [torch.as_tensor(a).to(self._device) for a in inputs]
        if self._device.type == "cuda":
            return self._cuda_timer(given)

        run = stopwatch(lambda: self._forward(given))

        def once() -> float:
            with self._running():
                return run()

        return once

    def reload(self) -> TorchEngine:
        """Return it with a copy of the module."""
        if self._module is None:
            raise BackendError("this engine is closed")
        return TorchEngine(
            self._module, self._inputs, device=str(self._device), threads=self._threads, compiled=self._compiled,
            graph_replay=self._graph_replay,
        )  # fmt: skip

    def close(self) -> None:
        """Free the module."""
        self._module = None

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

    def _cuda_timer(self, inputs: Sequence[Tensor]) -> Timer:
        replay: Callable[[], object] = lambda: self._forward(inputs)  # noqa: E731
        if self._graph_replay:
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side), self._running():
                for _ in range(3):  # a capture must not meet lazy initialisation
                    self._forward(inputs)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with self._running(), torch.cuda.graph(graph):
                self._forward(inputs)
            replay = graph.replay

        def once() -> float:
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            with self._running():
                start.record()
                replay()
                end.record()
            torch.cuda.synchronize(self._device)
            return float(start.elapsed_time(end))

        return once


class TorchBackend(Backend):
    """PyTorch on ``device`` ("cpu", "cuda", "cuda:1"), eager or ``compiled``; ``threads`` on the CPU."""

    name: ClassVar[str] = "torch"

    def __init__(
        self,
        device: str = "cpu",
        threads: int = 1,
        compiled: bool = False,
        graph_replay: bool = True,
        precision: str | None = None,
    ) -> None:
        if precision not in (None, "fp32"):
            raise InputError(f"precision {precision!r}: PyTorch runs a network in the precision that it has")
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
            }
        return Fingerprint(
            backend=self.name,
            device=device,
            runtime="PyTorch",
            version=str(torch.__version__),
            threads=self.threads,
            precision="as in the network",
            settings=tuple(sorted(settings.items())),
        )

    def require_quiet(self) -> None:
        """Ask for a core that this thread has most of the time; on CUDA for nothing."""
        if self._device.type == "cpu":
            require_core()

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
        )
