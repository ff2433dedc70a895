"""Prune ONNX files with onnxsim and with smcp_fx to the same FLOPs, and compare them with the whole file.

    python tools/compare_onnxsim.py FILE [--images FOLDER] [--size HxW] [--outputs classes] [--target 0.7]

Needs ``pip install onnxsim==0.8.1``. Half of the images calibrate both, the others are compared. onnxsim is given the
least sparsity that reaches the target, for channels by the norm of their weights and by that of their activations,
and its fine-tuning of linear layers. Latencies are ONNX Runtime's, one thread, one sample. A line of JSON for each is
appended to docs/records/onnxsim.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from PIL import Image

import smcp_fx
from smcp_fx.backends import compare as in_turns
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeEngine

RECORD = Path(__file__).resolve().parent.parent / "docs" / "records" / "onnxsim.jsonl"
#: Halvings of the sparsity's range; samples at a time.
_HALVINGS, _BATCH = 7, 8


class Comparison:
    """A file, samples to calibrate with and to compare on, and what its outputs are."""

    def __init__(self, file: Path, samples: np.ndarray[Any, Any], outputs: str) -> None:
        self.file, self.outputs = file, outputs
        self.fitting, self.others = samples[::2], samples[1::2]
        self.example = torch.from_numpy(samples[:2].copy())
        self.name = onnx.load(file).graph.input[0].name
        self.whole = self.run(file)
        self.full = self.cost(file)

    def run(self, file: Path) -> np.ndarray[Any, Any]:
        """Return a file's outputs on the samples to compare on."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(file, options)
        parts = range(0, len(self.others), _BATCH)
        return np.concatenate([session.run(None, {self.name: self.others[i : i + _BATCH]})[0] for i in parts])

    def cost(self, file: Path) -> float:
        """Return a file's multiply-adds."""
        model = smcp_fx.from_onnx(file, self.example)
        cost: float = smcp_fx.prepare(model, (self.example,), target=0.99).pruner.full_cost
        return cost

    def row(self, method: str, file: Path, sparsity: float | None = None) -> dict[str, Any]:
        """Return what is left of the file: its FLOPs, and agreement as smcp-compile tells it."""
        found, whole = self.run(file), self.whole
        if self.outputs.startswith("classes"):
            agreement = float((found.argmax(-1) == whole.argmax(-1)).mean())
        else:
            agreement = 1 - float(((found - whole) ** 2).mean() / whole.var())
        return {
            "file": self.file.name, "method": method, "sparsity": sparsity, "samples": len(self.others),
            "flops": round(self.cost(file) / self.full, 4), "agreement": round(agreement, 4),
            "latency": round(self.latency(file), 4),
        }  # fmt: skip

    def latency(self, file: Path) -> float:
        """Return a file's measured latency for one sample, as a share of the whole file's."""
        one = [self.others[:1]]
        with OnnxRuntimeEngine(self.file, one) as whole, OnnxRuntimeEngine(file, one) as pruned:
            return float(in_turns(whole, pruned).fraction)

    def least(self, prune: Callable[[float], Any], target: float, path: Path) -> float | None:
        """Write the least pruned network that reaches the target; return its sparsity, or None if none does."""
        low, high, found = 0.0, 1.0, None
        for _ in range(_HALVINGS):
            sparsity = (low + high) / 2
            onnx.save(prune(sparsity), path.with_suffix(".try.onnx"))
            if self.cost(path.with_suffix(".try.onnx")) <= target * self.full:
                high = found = sparsity
                path.with_suffix(".try.onnx").replace(path)
            else:
                low = sparsity
        return found


def compare(comparison: Comparison, target: float, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each method."""
    import onnxsim

    simple, _ = onnxsim.simplify(onnx.load(comparison.file))
    fitting = [
        {comparison.name: comparison.fitting[i : i + _BATCH]}
        for i in range(0, len(comparison.fitting), _BATCH)
    ]
    methods: dict[str, Callable[[float], Any]] = {
        "onnxsim, weights": lambda s: onnxsim.apply_structured_pruning(simple, sparsity=s),
        "onnxsim, activations": lambda s: onnxsim.apply_structured_wanda_pruning(
            simple, calibration_data=fitting, sparsity=s
        ),
    }
    rows, path = [], folder / "pruned.onnx"
    for method, prune in methods.items():
        sparsity = comparison.least(prune, target, path)
        if sparsity is None:
            least = comparison.cost(path.with_suffix(".try.onnx")) / comparison.full
            rows.append({"file": comparison.file.name, "method": method, "least": round(least, 4)})
            continue
        rows.append(comparison.row(method, path, sparsity))
        onnx.save(onnxsim.apply_pruning_finetune(simple, onnx.load(path), calibration_data=fitting), path)
        rows.append(comparison.row(f"{method}, fine-tuned", path, sparsity))
    model = smcp_fx.from_onnx(comparison.file, comparison.example)
    batches = [torch.from_numpy(batch[comparison.name]) for batch in fitting]
    smaller = smcp_fx.compress(model, batches, target=target, outputs=comparison.outputs)
    smcp_fx.export_onnx(smaller, (comparison.example,), path, input_names=[comparison.name])
    return [*rows, comparison.row("smcp_fx", path)]


def read(folder: Path, height: int, width: int) -> np.ndarray[Any, Any]:
    """Return the images of a folder, BGR, from -1 to 1, [n, 3, h, w]."""
    found = []
    for file in sorted(folder.iterdir()):
        picture = Image.open(file).convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        found.append((np.asarray(picture, np.float32)[:, :, ::-1] / 127.5 - 1).transpose(2, 0, 1))
    return np.stack(found)


def main() -> int:
    """Compare, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--size", default="48x192")
    parser.add_argument("--outputs", default="classes")
    parser.add_argument("--target", type=float, default=0.7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples = read(options.images, *map(int, options.size.split("x")))
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Comparison(options.file, samples, options.outputs), options.target, Path(folder))
    with RECORD.open("a") as record:
        record.writelines(json.dumps(row) + "\n" for row in rows)
    print(*map(json.dumps, rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
