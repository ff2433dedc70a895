"""Record which names the installed TensorRT bindings have: tests hold the worker and their stand-in against them.

python tools/record_tensorrt_names.py tests/backends/tensorrt_names.json     adds or renews this version
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

CLASSES = """
Builder IBuilderConfig INetworkDefinition ILayer ITensor OnnxParser ParserError IOptimizationProfile Runtime
ICudaEngine IExecutionContext EngineInspector ITimingCache IHostMemory ILogger IProfiler""".split()
ENUMS = """BuilderFlag NetworkDefinitionCreationFlag ProfilingVerbosity MemoryPoolType TacticSource TensorFormat
TensorIOMode LayerInformationFormat DataType LayerType""".split()


def names(bindings: Any) -> dict[str, Any]:
    """Return the public names of the classes, and the enumerations' values."""
    found: dict[str, Any] = {}
    for name in CLASSES:
        found[name] = sorted(n for n in dir(getattr(bindings, name)) if not n.startswith("_"))
    for name in ENUMS:
        found[name] = {key: int(value) for key, value in getattr(bindings, name).__members__.items()}
    return found


def main() -> int:
    """Write the record."""
    path = Path(sys.argv[1])
    try:
        bindings = importlib.import_module("tensorrt")
    except ImportError:
        bindings = importlib.import_module("tensorrt_bindings")  # what the wheels of 8.6 and later call them
    record = json.loads(path.read_text()) if path.exists() else {}
    record[bindings.__version__] = names(bindings)
    ordered = sorted(record, key=lambda version: [int(part) for part in version.split(".")])
    lines = [
        f' "{version}": {{\n'
        + ",\n".join(f'  "{c}": {json.dumps(v)}' for c, v in record[version].items())
        + "\n }"
        for version in ordered
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
