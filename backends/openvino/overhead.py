"""The cost of OpenVINO's runs that its performance counts leave out.

Two chains of small convolutions, a short and a long one, are timed without counts: the slope is a node's
cost, the rest that of a run without nodes. The counts fall short of the slope by the time between two nodes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from smcp_fx.backends.onnx.chain import CHAIN, chain_feed, chain_model
from smcp_fx.backends.openvino.session import Session
from smcp_fx.backends.timing.measuring import calm, stopwatch, take_sample
from smcp_fx.backends.timing.pace import pace

#: Nodes in the short and in the long chain; rounds, and runs of both in each. Chosen, not measured.
_LENGTHS, _ROUNDS, _RUNS, _ENOUGH = (8, 48), 3, 60, 12


@dataclass(frozen=True)
class Overhead:
    """``run_ms``: a run's own cost outside its nodes; ``node_ms``: a node's cost outside its counts."""

    run_ms: float
    node_ms: float


@functools.cache
def overhead(threads: int = 1) -> Overhead:
    """Measure it once per process: the least of a few rounds, as disturbances only make a run longer."""
    sessions = [_fed(length, threads, counts=False) for length in _LENGTHS]
    timers = [stopwatch(session.run) for session in sessions]
    core = pace() if threads == 1 else None
    rounds = []
    for _ in range(_ROUNDS):
        turns = [[take_sample(timer, core) for timer in timers] for _ in range(_RUNS)][_RUNS // 4 :]
        each = [calm(samples, _ENOUGH) for samples in zip(*turns, strict=True)]
        rounds.append([float(np.median([sample.ms for sample in samples])) for samples in each])
    node = min(long - short for short, long in rounds) / (_LENGTHS[1] - _LENGTHS[0])
    run = min(short for short, _ in rounds) - _LENGTHS[0] * node
    return Overhead(max(run, 0.0), max(node - _counted(threads), 0.0))


def _counted(threads: int) -> float:
    """Return a link's ms by the counts."""
    session = _fed(_LENGTHS[1], threads, counts=True)
    for _ in range(_RUNS // 4):
        session.run()
    before = session.spent()
    for _ in range(_RUNS):
        session.run()
    spent = session.spent()
    links = [name for name in spent if name.startswith(f"{CHAIN}_link")]
    return float(np.median([spent[name] - before[name] for name in links])) / _RUNS


def _fed(length: int, threads: int, counts: bool) -> Session:
    session = Session(chain_model(length), threads, counts=counts)
    session.feed(list(chain_feed().values()))
    return session
