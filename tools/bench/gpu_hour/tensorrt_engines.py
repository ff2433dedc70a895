"""Whole engines of TensorRT: tables and targets, agreement with PyTorch, and INT8."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from gpu_hour.networks import images, network
from gpu_hour.session import Session
from gpu_hour.targets import Job
from gpu_hour.tensorrt_rows import chosen, make_backend
from smcp_fx.backends.tensorrt.backend import TensorRTBackend, reference_outputs

#: Random prunings beside the dense network and the targets: an engine takes half a minute.
KEEP = (0.7, 0.4)
#: No engine is begun with less time left: ResNet-50's took 37 s at batch 256.
_BUILD_S = 25.0


def resnet18(session: Session) -> None:
    """ResNet-18 at batch 64 to half its latency."""
    _prune(session, "resnet18")


def resnet50(session: Session) -> None:
    """ResNet-50 at batch 64 to half its latency."""
    _prune(session, "resnet50")


def int8(session: Session) -> None:
    """ResNet-50 in INT8 by explicit quantisation: types, outputs, latency, and pruned to half by INT8 rows."""
    arrays = [image.numpy() for image in images(32, session.small).split(8)]
    with closing(make_backend(session, "int8", arrays)) as backend:
        session.attempt("outputs", partial(_outputs, session, backend, "resnet50", 64), 60)
        Job(session, backend, "resnet50", 64, chosen(session)["multiple"], _BUILD_S).prune((0.5,), ())


def engines(session: Session) -> None:
    """ResNet-50 in fp16 at batches 256 and 1, and in fp32 without TF32: outputs and latency."""
    with closing(make_backend(session)) as half, closing(make_backend(session, "fp32")) as exact:
        for name, backend, batch in (("fp16", half, 256), ("fp16, batch 1", half, 1), ("fp32", exact, 8)):
            session.attempt(name, partial(_outputs, session, backend, "resnet50", batch), 60)


def _prune(session: Session, name: str) -> None:
    with closing(make_backend(session)) as backend:
        Job(session, backend, name, 64, chosen(session)["multiple"], _BUILD_S).prune((0.5,), KEEP)


def _outputs(session: Session, backend: TensorRTBackend, name: str, batch: int) -> dict[str, Any]:
    """Build the dense network at a batch, compare it with PyTorch's float32, measure it with a graph and without."""
    module, given = network(name, session.small), images(batch, session.small)
    with backend.compile(module, (given,)) as engine:
        expected = reference_outputs(module, (given,))[0]
        error = float(np.abs(engine.run([given.numpy()])[0] - expected).max() / np.abs(expected).max())
        timings = {
            how: backend.ask("measure", key=engine._key, timing={"graph": how == "graph"})["measured"]
            for how in ("graph", "enqueue")
        }
        build = {
            k: engine.build[k] for k in ("seconds", "engine_bytes", "types", "reformats", "notes", "tf32")
        }
        return {
            "network": name, "side": given.shape[-1], "batch": len(given), "relative_error": error,
            "build": build, **timings, "clocks": backend.ask("clocks")["clocks"], "remarks": engine.remarks,
        }  # fmt: skip
