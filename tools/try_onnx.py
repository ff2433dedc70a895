"""Compares the ONNX file of a sliced model with the model."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison import difference, run
from random_weights import CALM

#: Largest difference from PyTorch over the scale that passes, as in the export's own check.
LIMIT = 1e-4
#: Beyond it, how many times PyTorch's own rounding may be.
TIMES = 4


def check_onnx(
    sliced: Any, inputs: tuple[Any, ...], row: dict[str, Any], instead: Callable[[], Any] | None = None
) -> None:
    """Export with its check, run with ONNX Runtime, and note the largest difference from PyTorch.

    ``instead``: makes the network to export if this one amplifies rounding beyond the check's limit.
    """
    from smcp_fx.errors import BackendError

    try:
        row["onnx_error"] = _exported_error(sliced, inputs, row)
        excess = row["onnx_error"] > LIMIT
    except BackendError as error:
        if "of the output's scale" not in str(error) or instead is None:
            raise
        excess = True
    bound = LIMIT
    if excess and instead is not None:
        row["onnx_strength"], sliced = CALM, instead()
        row["onnx_error"] = _exported_error(sliced, inputs, row)
    if row["onnx_error"] > LIMIT:
        row["onnx_rounding"] = _rounding(sliced, inputs)
        bound = max(LIMIT, TIMES * row["onnx_rounding"])
    if not row["onnx_error"] <= bound:
        raise ArithmeticError(f"ONNX Runtime and PyTorch differ by {row['onnx_error']:.3g}")


def _rounding(sliced: Any, inputs: tuple[Any, ...]) -> float:
    """What PyTorch's own float32 differs by from its float64."""
    import torch

    plain = run(sliced, inputs)
    wide = run(
        copy.deepcopy(sliced).double(), tuple(i.double() if i.is_floating_point() else i for i in inputs)
    )
    return difference(torch.utils._pytree.tree_map(lambda t: t.double(), plain), wide)


def _exported_error(sliced: Any, inputs: tuple[Any, ...], row: dict[str, Any]) -> float:
    """Export, run, and return the largest difference over the scale."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(sliced, inputs, path, row)
        return difference(run_onnx(path, inputs), run(sliced, inputs))


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
