"""Threads and processes: prepared beside each other and trained in workers, models are as they are alone."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from models import Residual, conv_bn
from processes import CONTEXT
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import CheckpointError

IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
SCHEDULE = smcp_fx.Schedule(epochs=1, steps_per_epoch=4, warmup=0, ramp=0.5, cooldown=0.25, every=1)


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if seed % 2:
        return Residual(8 + seed, 12)
    return nn.Sequential(
        conv_bn(3, 8 + seed), nn.ReLU(), conv_bn(8 + seed, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def prepared(seed: int) -> smcp_fx.PreparedModel:
    config = smcp_fx.PruningConfig(multiple=1)
    return smcp_fx.prepare(model(seed), IMAGE, target=0.8, schedule=SCHEDULE, config=config)


def trained(network: smcp_fx.PreparedModel) -> Tensor:
    """What the smaller network gives after a few steps."""
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(network.train().parameters(), 0.01)
    for _ in range(4):
        optimizer.zero_grad()
        network(IMAGE).square().mean().backward()
        network.pruner.step()
        optimizer.step()
    with torch.no_grad():
        return smcp_fx.convert(network).eval()(IMAGE)


def in_threads(*actions: Callable[[], Any]) -> list[Any]:
    found: list[Any] = [None] * len(actions)

    def act(place: int) -> None:
        try:
            found[place] = actions[place]()
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=act, args=(place,)) for place in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_prepared_in_threads_as_one_after_the_other() -> None:
    other = model(0).eval()
    with torch.no_grad():
        expected, alone = other(IMAGE), [prepared(seed) for seed in range(4)]

        def forwards() -> list[Tensor]:
            with torch.no_grad():
                return [other(IMAGE) for _ in range(100)]

    *beside, given = in_threads(*(lambda seed=seed: prepared(seed) for seed in range(4)), forwards)
    assert all(torch.equal(one, expected) for one in given)  # fx's patches are the process's
    for one, two in zip(alone, beside, strict=True):
        assert two.code == one.code
        assert [(g.name, g.size, g.free) for g in two.channels.groups] == [
            (g.name, g.size, g.free) for g in one.channels.groups
        ]


def test_trained_in_threads_as_alone() -> None:
    alone = [trained(prepared(seed)) for seed in (0, 1)]
    networks = [prepared(seed) for seed in (0, 1)]
    beside = in_threads(*(lambda one=one: trained(one) for one in networks))
    assert all(torch.equal(one, two) for one, two in zip(alone, beside, strict=True))


def computed(network: smcp_fx.PreparedModel) -> Tensor:
    with torch.no_grad():
        return network.eval()(IMAGE)


def _convert(network: smcp_fx.PreparedModel, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put(computed(network).tolist())


def _train(state: dict[str, Tensor], queue: Any) -> None:
    network = prepared(1)
    network.load_state_dict(state)
    queue.put(trained(network).tolist())


def _answer(start: str, work: Callable[..., None], given: Any) -> Tensor:
    context = CONTEXT if start == "anew" else multiprocessing.get_context(start)
    queue = context.Queue()
    worker = context.Process(target=work, args=(given, queue))
    worker.start()
    found = torch.tensor(queue.get(timeout=240))
    worker.join()
    return found


def test_a_forked_worker_has_the_model() -> None:
    """It trains none: PyTorch refuses that where the process has trained in threads."""
    network = prepared(1)
    assert torch.equal(_answer("fork", _convert, network), computed(network))


def test_a_worker_that_begins_anew_is_given_the_state_as_the_error_says() -> None:
    network = prepared(1)
    with pytest.raises(CheckpointError, match=r"not pickled: save prepared\.state_dict\(\)"):
        ForkingPickler.dumps(network)  # as it goes to such a process
    assert torch.equal(_answer("anew", _train, network.state_dict()), trained(network))
