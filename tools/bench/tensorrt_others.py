"""What else runs a network in fp16 on an NVIDIA GPU: PyTorch, eager and compiled, and ONNX Runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from smcp_fx.backends import TimingConfig, get_backend
from smcp_fx.backends.timing.measuring import measure_timers, stopwatch

#: Enough for one figure among others.
SHORT = TimingConfig(max_repeats=50, attempts=2)


class Runtimes:
    """A network on random images of ``shape``; ``folder`` keeps the ONNX file."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], folder: Path) -> None:
        self.model, self.images, self.folder = model, torch.randn(shape).half(), folder

    def ways(self) -> dict[str, Callable[[], float]]:
        """By name, what returns the median ms; `SmcpError` or `ImportError` where it cannot run here."""
        return {
            "torch_eager": lambda: self.in_torch(compiled=False),
            "torch_compile": lambda: self.in_torch(compiled=True),
            "onnxruntime_cuda": lambda: self.in_onnxruntime("CUDAExecutionProvider"),
            "onnxruntime_tensorrt": lambda: self.in_onnxruntime("TensorrtExecutionProvider"),
        }

    def in_torch(self, compiled: bool) -> float:
        """In PyTorch, channels-last; eager as a CUDA graph's replay."""
        backend = get_backend("torch", device="cuda", compiled=compiled, graph_replay=not compiled)
        module = copy.deepcopy(self.model).half().to(memory_format=torch.channels_last)
        x = self.images.contiguous(memory_format=torch.channels_last)
        with backend.compile(module, (x,)) as engine:
            return engine.latency(config=SHORT).median_ms

    def in_onnxruntime(self, provider: str) -> float:
        """In ONNX Runtime, from the same file as TensorRT's; a fall back to another provider is an error."""
        import onnxruntime

        from smcp_fx.backends.onnxruntime.session import bound_run, session_options

        if provider not in onnxruntime.get_available_providers():
            raise ImportError(f"ONNX Runtime {onnxruntime.__version__} has no {provider} here")
        settings = {"trt_fp16_enable": "1"} if "Tensorrt" in provider else {}
        session = onnxruntime.InferenceSession(
            str(self.onnx_file()),
            session_options(),
            providers=[(provider, settings), "CUDAExecutionProvider"],
        )
        if session.get_providers()[0] != provider:  # it goes on without what it cannot load
            raise ImportError(f"ONNX Runtime {onnxruntime.__version__} cannot load its {provider}")
        run = bound_run(session, {session.get_inputs()[0].name: self.images.numpy()}, "cuda")
        return measure_timers([stopwatch(run)], SHORT)[0].median_ms

    def onnx_file(self) -> Path:
        """The dense network in fp16 at the images' batch, as `TensorRTBackend.compile` writes it."""
        from smcp_fx.backends.onnx.export import export_model_proto, write_model
        from smcp_fx.backends.onnx.precision import cast_model
        from smcp_fx.backends.tensorrt.answers import OPSET

        file = self.folder / "others.onnx"
        if not file.exists():
            dense = copy.deepcopy(self.model).cpu()
            proto = export_model_proto(dense, (self.images.float(),), opset=OPSET, dynamic_batch=False)
            write_model(cast_model(proto, "fp16"), file)
        return file
