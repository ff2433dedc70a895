"""Pruning a YOLO in ultralytics' own trainer; then it validates, predicts and exports the smaller one.

pip install ultralytics
python examples/ultralytics_training.py

ultralytics is under the AGPL, and no dependency of smcp_fx.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer

from smcp_fx.integrations.ultralytics import PruningTrainer


# --8<-- [start:trainer]
class Trainer(PruningTrainer, DetectionTrainer):
    """A trainer whose models are pruned to half of their FLOPs."""

    target = 0.5


# --8<-- [end:trainer]


def squares(folder: Path, images: int = 8, size: int = 64) -> Path:
    """Write images of bright squares, and return the file that describes them."""
    draw = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for index in range(images):
        pixels = draw.integers(0, 60, (size, size, 3), dtype=np.uint8)
        left, top = draw.integers(4, size // 2, 2)
        pixels[top : top + 24, left : left + 24] = 220
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
        box = ((left + 12) / size, (top + 12) / size, 24 / size, 24 / size)
        (folder / "labels" / f"{index}.txt").write_text("0 " + " ".join(map(str, box)))
    data = folder / "data.yaml"
    data.write_text(f"path: {folder}\ntrain: images\nval: images\nnames: {{0: square}}\n")
    return data


def main(model: str = "yolo11n.yaml", epochs: int = 2) -> None:
    """Train, prune, and use the result."""
    folder = Path(tempfile.mkdtemp())
    data = squares(folder / "squares")
    # --8<-- [start:train]
    yolo = YOLO(model)
    yolo.train(
        trainer=Trainer,
        data=data,
        epochs=epochs,
        imgsz=64,
        batch=4,
        nbs=4,
        plots=False,
        project=str(folder),
    )
    # best.pt is the smaller network, and so is yolo.model now
    yolo.val(data=data, imgsz=64, plots=False)
    yolo.predict(folder / "squares" / "images", imgsz=64)
    yolo.export(format="onnx", imgsz=64)
    # --8<-- [end:train]
    print(f"{sum(p.numel() for p in yolo.model.parameters()):,} parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
