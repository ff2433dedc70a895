"""Compares the ONNX file of a sliced model with the model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison import difference, run
from random_weights import CALM

#: Largest difference from PyTorch over the scale that passes, as in the export's own check.
LIMIT = 1e-4


def check_onnx(
    sliced: Any, inputs: tuple[Any, ...], row: dict[str, Any], instead: Callable[[], Any] | None = None
) -> None:
    """Export with its check, run with ONNX Runtime, and note the largest difference from PyTorch.

    ``instead``: makes the network to export if this one amplifies rounding beyond the check's limit.
    """
    from smcp_fx.errors import BackendError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            export(sliced, inputs, path, row)
        except BackendError as error:
            if "of the output's scale" not in str(error) or instead is None:
                raise
            row["onnx_strength"] = CALM
            sliced = instead()
            export(sliced, inputs, path, row)
        row["onnx_error"] = difference(run_onnx(path, inputs), run(sliced, inputs))
    if not row["onnx_error"] <= LIMIT:
        raise ArithmeticError(f"ONNX Runtime and PyTorch differ by {row['onnx_error']:.3g}")


def export(sliced: Any, inputs: tuple[Any, ...], path: Path, row: dict[str, Any]) -> None:
    """Write the ONNX file, for one batch size where an operation wants that."""
    from smcp_fx.backends.onnx.export import export_onnx
    from smcp_fx.errors import BackendError

    try:
        export_onnx(sliced, inputs, path)
    except BackendError as error:
        if "dynamic_batch=False" not in str(error):
            raise
        row["onnx_batch"] = int(inputs[0].shape[0])
        export_onnx(sliced, inputs, path, dynamic_batch=False)


def run_onnx(path: Path, inputs: tuple[Any, ...]) -> list[Any]:
    """The file's outputs in ONNX Runtime, on one thread."""
    import onnxruntime
    import torch

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    found = session.run(None, dict(zip(names, (i.numpy() for i in inputs), strict=True)))
    return [torch.from_numpy(array) for array in found]
