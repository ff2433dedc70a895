"""The GPU through the CUDA runtime: memory, streams, events, graphs, and the GPU's properties."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .problems import WorkerError, import_cuda

_NO_DRIVER = {35: "no NVIDIA driver, or one older than cuda-bindings' CUDA", 100: "no NVIDIA GPU"}
#: The clocks to record, by nvidia-smi's names.
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"


class Device:
    """One GPU. Every call is checked; `WorkerError` names the call and the reason."""

    def __init__(self, index: int = 0) -> None:
        self.api = import_cuda()
        error, count = (*self.api.cudaGetDeviceCount(), 0)[:2]
        reason = _NO_DRIVER.get(int(error))
        if reason or (int(error) == 0 and not count):
            raise WorkerError(
                f"{reason or 'no NVIDIA GPU'} on this machine (CUDA error {int(error)}): nvidia-smi should list the "
                "GPU and the driver's CUDA version; install a driver, or cuda-bindings of that version or older. A "
                "table can be filled elsewhere: smcp-table measure --emit-requests FOLDER"
            )
        self.check("cudaGetDeviceCount", (error, count))
        if index >= count:
            raise WorkerError(f"there is no GPU {index}: this machine has {count}, counted from 0")
        self.index = index
        self("cudaSetDevice", index)
        self.stream = self("cudaStreamCreateWithFlags", self.api.cudaStreamNonBlocking)
        self._start, self._stop = self("cudaEventCreate"), self("cudaEventCreate")
        # nvidia-smi orders GPUs differently than CUDA does; it knows a GPU that is no PCI device by number.
        error, bus = (*self.api.cudaDeviceGetPCIBusId(32, index), b"")[:2]
        self._smi_id = bus.split(b"\0")[0].decode() if int(error) == 0 and bus else str(index)

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a function of the runtime and return its value."""
        return self.check(name, getattr(self.api, name)(*arguments))

    def check(self, name: str, result: tuple[Any, ...]) -> Any:
        """Return the value of a call's result; `WorkerError` for an error."""
        error, *values = result
        if int(error) != 0:
            told = getattr(error, "name", error)
            raise WorkerError(f"{name} failed: {told}" + (_MEMORY if int(error) == 2 else ""))
        return values[0] if len(values) == 1 else tuple(values)

    @property
    def stream_handle(self) -> int:
        """The stream as TensorRT takes it."""
        return int(self.stream)

    def wait(self) -> None:
        """Wait until the stream is done."""
        self("cudaStreamSynchronize", self.stream)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Copy an array to device memory."""
        data = np.ascontiguousarray(array)
        self._copy(address, data.ctypes.data, data.nbytes, self.api.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def fill(self, address: int, pool: NDArray[Any], size: int) -> None:
        """Repeat ``pool`` over ``size`` bytes of device memory; uploading a whole batch would take too long."""
        self.upload(address, pool[: max(1, size // pool.itemsize)])
        done, kind = pool.nbytes, self.api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        while done < size:
            self._copy(address + done, address, min(done, size - done), kind)
            done *= 2

    def download(self, array: NDArray[Any], address: int) -> None:
        """Fill an array from device memory."""
        kind = self.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy(array.ctypes.data, address, array.nbytes, kind)

    def _copy(self, target: int, source: int, size: int, kind: Any) -> None:
        # Plain cudaMemcpy may return before the data is there, and this stream does not wait for it.
        self("cudaMemcpyAsync", target, source, size, kind, self.stream)
        self.wait()

    def stopwatch(self, run: Callable[[], None]) -> Callable[[], float]:
        """Return a function that runs once and returns the ms between two events around it."""

        def once() -> float:
            self("cudaEventRecord", self._start, self.stream)
            run()
            self("cudaEventRecord", self._stop, self.stream)
            self.wait()
            return float(self("cudaEventElapsedTime", self._start, self._stop))

        return once

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """Return a graph of the work that ``enqueue`` puts on the stream, ready to launch."""
        self(
            "cudaStreamBeginCapture",
            self.stream,
            self.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal,
        )
        try:
            enqueue()
        finally:
            graph = self("cudaStreamEndCapture", self.stream)
        try:
            return self("cudaGraphInstantiateWithFlags", graph, 0)  # one signature in CUDA 11, 12 and 13
        finally:
            self("cudaGraphDestroy", graph)

    def about(self) -> dict[str, Any]:
        """Return the GPU's properties and the versions."""
        attribute, of = self.api.cudaDeviceAttr, self.index
        get = {
            name: self("cudaDeviceGetAttribute", getattr(attribute, f"cudaDevAttr{key}"), of)
            for name, key in (
                ("major", "ComputeCapabilityMajor"),
                ("minor", "ComputeCapabilityMinor"),
                ("multiprocessors", "MultiProcessorCount"),
                ("l2_bytes", "L2CacheSize"),
            )
        }
        name = self("cudaGetDeviceProperties", of).name
        driver = _nvidia_smi("driver_version", self._smi_id) or f"CUDA {self('cudaDriverGetVersion')}"
        return {
            "device": (name.decode() if isinstance(name, bytes) else str(name)).strip("\0 "),
            "compute_capability": f"{get['major']}.{get['minor']}",
            "multiprocessors": get["multiprocessors"],
            "l2_bytes": get["l2_bytes"],
            "memory_bytes": int(self("cudaMemGetInfo")[1]),
            "driver": driver,
            "cuda_runtime": int(self("cudaRuntimeGetVersion")),
            "machine": platform.machine(),
            "python": ".".join(map(str, sys.version_info[:3])),
        }

    def clocks(self) -> dict[str, str] | None:
        """Return clocks (MHz), temperature (C) and power (W) as nvidia-smi reports now; None without it."""
        told = _nvidia_smi(_CLOCKS, self._smi_id)
        if told is None:
            return None
        return dict(zip(_CLOCKS.split(","), (value.strip() for value in told.split(",")), strict=False))


_MEMORY = ": the GPU's memory is full. Use a smaller batch or workspace, or end other programs on it"


def _nvidia_smi(query: str, gpu: str) -> str | None:
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
