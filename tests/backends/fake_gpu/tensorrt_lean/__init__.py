"""A stand-in for tensorrt_lean's bindings: of the full ones what runs engines, and nothing that builds them."""

from tensorrt import (
    DataType,
    ICudaEngine,
    IExecutionContext,
    ILogger,
    IProfiler,
    LayerInformationFormat,
    Runtime,
    TensorIOMode,
    __version__,
)

__all__ = [
    "DataType",
    "ICudaEngine",
    "IExecutionContext",
    "ILogger",
    "IProfiler",
    "LayerInformationFormat",
    "Runtime",
    "TensorIOMode",
    "__version__",
]
