"""PyTorch on CUDA graphs, in fp16 with channels last: no engine is built, so that a table is a matter of a minute."""

from __future__ import annotations

from functools import partial

from gpu_hour.networks import images, network
from gpu_hour.session import Session
from gpu_hour.targets import Job
from smcp_fx.backends import get_backend

#: Random prunings that the table's sums are held against.
KEEP = (0.85, 0.7, 0.55, 0.4, 0.3)


def resnet50(session: Session) -> None:
    """ResNet-50 at batch 64 to 50 and 30% of the latency; what graphs and `torch.compile` are worth, last."""
    _job(session, "resnet50").prune((0.5, 0.3), KEEP)
    for name, options in {"without a graph": {"graph_replay": False}, "compiled": {"compiled": True}}.items():
        session.attempt(name, partial(_latency, session, "resnet50", options), 60)


def mobilenet_v2(session: Session) -> None:
    """The same targets for MobileNetV2, whose layers are short."""
    _job(session, "mobilenet_v2").prune((0.5, 0.3), KEEP)


def _job(session: Session, name: str) -> Job:
    return Job(session, get_backend("torch", device=session.device, precision="fp16"), name, 64)


def _latency(session: Session, name: str, options: dict[str, bool]) -> dict[str, float]:
    backend = get_backend("torch", device=session.device, precision="fp16", **options)
    with backend.compile(network(name, session.small), (images(64, session.small),)) as engine:
        found = engine.latency()
    return {"median_ms": found.median_ms, "spread": found.spread}
