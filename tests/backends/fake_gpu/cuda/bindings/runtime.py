# ruff: noqa: N801, N802, N815, N816 - CUDA's own names
"""A stand-in for cuda.bindings.runtime: host memory, and a clock that only engines' runs move.

FAKE_CUDA=35 (no driver) or 100 (no GPU) makes every call fail as it does there.
"""

from __future__ import annotations

import ctypes
import enum
import os
from types import SimpleNamespace
from typing import Any

cudaStreamNonBlocking = 1


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


class cudaDeviceAttr(enum.IntEnum):
    cudaDevAttrMultiProcessorCount = 16
    cudaDevAttrL2CacheSize = 38
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


_VALUES = {16: 4, 38: 4 << 20, 75: 9, 76: 0}
_OK = (cudaError_t.cudaSuccess,)
_buffers: dict[int, Any] = {}
#: The device's clock, ms; what is being captured; launching costs this much.
clock = SimpleNamespace(ms=0.0, capturing=None)
LAUNCH_MS = 0.002


def enqueue(ms: float) -> None:
    """Take ``ms`` of the device's time, now or when the graph under capture is launched."""
    if clock.capturing is not None:
        clock.capturing.append(ms)
    else:
        clock.ms += ms + LAUNCH_MS


def cudaGetDeviceCount() -> tuple[Any, ...]:
    error = cudaError_t(int(os.environ.get("FAKE_CUDA", "0")))
    return (error, 0) if error else (*_OK, 1)


def cudaSetDevice(index: int) -> tuple[Any, ...]:
    return _OK


def cudaStreamCreateWithFlags(flags: int) -> tuple[Any, ...]:
    return (*_OK, 1)


def cudaStreamSynchronize(stream: int) -> tuple[Any, ...]:
    return _OK


def cudaMalloc(size: int) -> tuple[Any, ...]:
    buffer = ctypes.create_string_buffer(size)
    address = ctypes.addressof(buffer)
    _buffers[address] = buffer
    return (*_OK, address)


def cudaFree(address: int) -> tuple[Any, ...]:
    return _OK if _buffers.pop(address, None) is not None else (cudaError_t.cudaErrorInvalidValue,)


def cudaMemcpyAsync(target: int, source: int, size: int, kind: int, stream: int) -> tuple[Any, ...]:
    on_device = {1: [target], 2: [source], 3: [target, source]}[int(kind)]
    if not all(any(0 <= at - a <= len(b) - size for a, b in _buffers.items()) for at in on_device):
        return (cudaError_t.cudaErrorInvalidValue,)
    ctypes.memmove(target, source, size)
    return _OK


def cudaMemGetInfo() -> tuple[Any, ...]:
    return (*_OK, 1 << 30, 2 << 30)


def cudaEventCreate() -> tuple[Any, ...]:
    return (*_OK, SimpleNamespace(ms=None))


def cudaEventRecord(event: Any, stream: int) -> tuple[Any, ...]:
    event.ms = clock.ms
    return _OK


def cudaEventElapsedTime(start: Any, stop: Any) -> tuple[Any, ...]:
    return (*_OK, stop.ms - start.ms)


def cudaStreamBeginCapture(stream: int, mode: int) -> tuple[Any, ...]:
    clock.capturing = []
    return _OK


def cudaStreamEndCapture(stream: int) -> tuple[Any, ...]:
    graph, clock.capturing = clock.capturing, None
    return (*_OK, graph)


def cudaGraphInstantiateWithFlags(graph: Any, flags: int) -> tuple[Any, ...]:
    return (*_OK, tuple(graph))


def cudaGraphDestroy(graph: Any) -> tuple[Any, ...]:
    return _OK


def cudaGraphExecDestroy(graph: Any) -> tuple[Any, ...]:
    return _OK


def cudaGraphLaunch(graph: Any, stream: int) -> tuple[Any, ...]:
    clock.ms += sum(graph) + LAUNCH_MS
    return _OK


def cudaDeviceGetAttribute(attribute: int, index: int) -> tuple[Any, ...]:
    return (*_OK, _VALUES[int(attribute)])


def cudaDeviceGetPCIBusId(length: int, index: int) -> tuple[Any, ...]:
    return (*_OK, b"0000:0A:00.0".ljust(length, b"\0"))


def cudaGetDeviceProperties(index: int) -> tuple[Any, ...]:
    return (*_OK, SimpleNamespace(name=os.environ.get("FAKE_GPU", "Pretend GPU").encode() + b"\0\0"))


def cudaDriverGetVersion() -> tuple[Any, ...]:
    return (*_OK, 12040)


def cudaRuntimeGetVersion() -> tuple[Any, ...]:
    return (*_OK, 12040)
