"""Methods that reduce a network's FLOPs without training: ours, parts of it, and rivals.

Rivals take whole channels, where FLOPs are what counts, and multiples of eight where latency is, as ours always does.
All see the same images. A method takes a `Setting` and an aim, and returns the network and the share of the cost that
it has: FLOPs, for ours whatever the setting's cost is. Until a measured latency is met, aims are corrected; the
setting's ``target`` stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from pretrained.latency import Reduce
from pretrained.torch_pruning_path import Step, torch_pruning
from torch import Tensor, nn

import smcp_fx
from smcp_fx.calibration import solve_best
from smcp_fx.prepared import Pruner

_BATCH, _MULTIPLE = 64, 8
#: Of methods that choose as we do, what of a `Setting` they choose by.
_PREPARED = {"ours": "ours", "ours, by FLOPs": "by_flops"}


class Setting:
    """A trained network and calibration images, and what is gathered from them once for all targets.

    ``target``: what is asked for now, by which worths are trusted. ``batch``: images at a time; ``loss`` of
    outputs and labels; ``head``: the path of the last layer, which rivals are told to leave alone; ``outputs``: what
    the outputs are, as for `smcp_fx.compress`. ``narrow``: `Stopwatch.narrowed` where measured latencies count.
    """

    target: float

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor | None,
        seed: int,
        cost: str | smcp_fx.LatencyCost = "flops",
        example: Tensor | None = None,
        batch: int = _BATCH,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        head: str = "head",
        outputs: str | dict[str, str] = "classes",
        narrow: Callable[[float, Reduce, float], float] | None = None,
    ) -> None:
        self.model, self.seed, self.cost, self.loss, self.head = model, seed, cost, loss, head
        self.outputs, self.narrow = outputs, narrow
        self.multiple = 1 if cost == "flops" else _MULTIPLE
        self.example = images[:2] if example is None else example
        self.images = list(images.split(batch))
        self.batches = (
            self.images if labels is None else list(zip(self.images, labels.split(batch), strict=True))
        )
        self._paths: dict[str, tuple[Iterator[Step], list[Step]]] = {}
        self._trusted: dict[tuple[str, float], smcp_fx.PreparedModel] = {}
        self._aims: dict[tuple[str, float], float] = {}
        self._chosen: dict[tuple[str, float, float], dict[str, Tensor]] = {}

    @cached_property
    def ours(self) -> smcp_fx.PreparedModel:
        """Prepared, with importances gathered."""
        return self._gathered(self.cost)

    def aim(self, method: str) -> float:
        """The share of the cost to ask a method for, so that what its network measures is the target."""
        if method in _PREPARED:
            self.trusted(_PREPARED[method])
        key = _PREPARED.get(method, method), self.target
        if key not in self._aims:
            assert self.narrow is not None
            self._aims[key] = self.narrow(self.target, partial(WIDTHS[method], self), self.target)
        return self._aims[key]

    def trusted(self, name: str) -> smcp_fx.PreparedModel:
        """The same (``ours`` or ``by_flops``) with worths trusted as far as `solve_best` does."""
        key = name, self.target
        if key not in self._trusted:
            prepared, aim = copy.deepcopy(getattr(self, name)), self.target
            pruner = prepared.pruner
            pruner.target = _reached(pruner, aim) * pruner.full_cost

            def aim_at(aim: float) -> None:
                pruner.correction = pruner.target / (_reached(pruner, aim) * pruner.full_cost)

            def reduce(aim: float) -> Found:
                aim_at(aim)
                pruner.solve()
                self._chosen[name, self.target, aim] = prepared.masks
                return _sliced(prepared)

            def correct() -> None:
                nonlocal aim
                assert self.narrow is not None
                aim = min(1.0, self.narrow(self.target, reduce, aim))
                aim_at(aim)
                prepared.set_masks(self._chosen[name, self.target, aim])

            solve_best(
                prepared, self.batches, self._loss, outputs=self._kinds, correct=self.narrow and correct
            )
            self._aims[key], self._chosen[name, self.target, aim] = aim, prepared.masks
            self._trusted[key] = prepared
        return self._trusted[key]

    def solved(self, name: str, aim: float) -> smcp_fx.PreparedModel:
        """The same with masks for an aim, once and for all: rows that are measured later change prices."""
        prepared, key = copy.deepcopy(self.trusted(name)), (name, self.target, aim)
        pruner = prepared.pruner
        if key in self._chosen:
            prepared.set_masks(self._chosen[key])
        else:
            pruner.correction = 1.0
            pruner.solve(_reached(pruner, aim))
            self._chosen[key] = prepared.masks
        return prepared

    @cached_property
    def by_flops(self) -> smcp_fx.PreparedModel:
        """The same where FLOPs are what channels cost."""
        return self.ours if self.cost == "flops" else self._gathered("flops")

    def _gathered(self, cost: str | smcp_fx.LatencyCost) -> smcp_fx.PreparedModel:
        torch.manual_seed(self.seed)
        prepared = smcp_fx.prepare(self.model, self.example, target=0.5, cost=cost)
        smcp_fx.gather_importance(prepared, self.batches, self._loss, outputs=self._kinds)
        return prepared

    @property
    def _loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """None where labels are to be drawn."""
        return self.loss if isinstance(self.batches[0], tuple) else None

    @property
    def _kinds(self) -> str | None:
        return self.outputs if self._loss is None else None

    @cached_property
    def free(self) -> smcp_fx.PreparedModel:
        """Prepared, with any number of channels permitted."""
        return smcp_fx.prepare(self.model, self.example, config=smcp_fx.PruningConfig(multiple=1))

    def along(self, kind: str, target: float) -> Step:
        """Return the first network of Torch-Pruning's path that is within the target; the last one where none is."""
        path = self._paths.pop(kind, None)  # put back unless a step fails: the next target then fails alike
        steps, passed = path or (self._walked(kind), [])
        while not passed or passed[-1][1] > target:
            following = next(steps, None)
            if following is None:
                break
            passed.append(following)
        self._paths[kind] = steps, passed
        model, share = next((step for step in passed if step[1] <= target), passed[-1])
        return copy.deepcopy(model), share

    def _walked(self, kind: str) -> Iterator[Step]:
        return torch_pruning(
            self.model, self.example, self.batches, self.loss, self.multiple, kind, self.head
        )


Found = tuple[nn.Module, float]


def ours(setting: Setting, target: float) -> Found:
    """What `smcp_fx.compress` does."""
    return _finished(setting, setting.solved("ours", target), repair=True)


def ours_by_flops(setting: Setting, target: float) -> Found:
    """The same with channels chosen by FLOPs, whatever the setting's cost is."""
    return _finished(setting, setting.solved("by_flops", target), repair=True)


def without_repair(setting: Setting, target: float) -> Found:
    """The same channels, with batch norms re-estimated only."""
    return _finished(setting, setting.solved("ours", target), repair=False)


def uniform_l2(setting: Setting, target: float) -> Found:
    """The same share of every group, the filters of the largest L2 norm; batch norms re-estimated."""
    return _finished(setting, _uniform(setting, target, _norms(setting.free)), repair=False)


def uniform_l2_repaired(setting: Setting, target: float) -> Found:
    """The same with our repair."""
    return _finished(setting, _uniform(setting, target, _norms(setting.free)), repair=True)


def random(setting: Setting, target: float) -> Found:
    """The same share of every group, at random; batch norms re-estimated."""
    return _finished(setting, _uniform(setting, target, _noise(setting)), repair=False)


def random_repaired(setting: Setting, target: float) -> Found:
    """The same with our repair."""
    return _finished(setting, _uniform(setting, target, _noise(setting)), repair=True)


def uniform_eliminated(setting: Setting, target: float) -> Found:
    """The same share of every group; within it our elimination and repair (nearly what OSSCAR does)."""
    scores = setting.by_flops.smcp.gathered
    return _finished(setting, _uniform(setting, target, scores), repair=True)


def recalibrated(model: nn.Module, setting: Setting) -> nn.Module:
    """Estimate the model's batch norms anew, if it has any."""
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        smcp_fx.recalibrate(model, setting.images)
    return model


def _sliced(prepared: smcp_fx.PreparedModel) -> Found:
    """The network that the present masks make, as it is: its widths are what counts."""
    share = prepared.pruner.present_cost / prepared.pruner.full_cost
    return smcp_fx.convert(prepared, check=False).eval(), share


def _torch_pruning(kind: str) -> Callable[[Setting, float], Found]:
    """What Torch-Pruning does; batch norms re-estimated."""

    def method(setting: Setting, target: float) -> Found:
        model, share = setting.along(kind, target)
        recalibrated(model, setting)
        return model, share

    return method


METHODS: dict[str, Callable[[Setting, float], Found]] = {
    "ours": ours,
    "ours, by FLOPs": ours_by_flops,
    "ours without repair": without_repair,
    "Torch-Pruning": _torch_pruning("Taylor"),
    "Torch-Pruning, isomorphic": _torch_pruning("isomorphic"),
    "Torch-Pruning, uniform L2": _torch_pruning("uniform L2"),
    "uniform L2": uniform_l2,
    "random": random,
    "uniform, eliminated and repaired": uniform_eliminated,
    "uniform L2, our repair": uniform_l2_repaired,
    "random, our repair": random_repaired,
}


#: Networks of the same widths, which are all that latencies need: what is uniform is the same without images.
WIDTHS: dict[str, Callable[[Setting, float], Found]] = METHODS | dict.fromkeys(
    ("uniform L2", "uniform, eliminated and repaired"),
    lambda setting, target: _sliced(_uniform(setting, target, _noise(setting))),
)


def _reached(pruner: Pruner, share: float) -> float:
    """The share of the cost, or the smallest that is within reach."""
    return max(share, (1 + 1e-6) * pruner.smallest_cost() / pruner.full_cost)


def _finished(setting: Setting, prepared: smcp_fx.PreparedModel, repair: bool) -> Found:
    smaller = smcp_fx.convert(prepared, check=False).eval()
    if repair:
        smcp_fx.repair(smaller, prepared, setting.images)
    else:
        recalibrated(smaller, setting)
    return smaller, prepared.pruner.present_cost / prepared.pruner.full_cost


def _uniform(setting: Setting, target: float, scores: Tensor) -> smcp_fx.PreparedModel:
    """Masks of the same share of every group, as large as the target lets it be, at least one channel or multiple."""
    prepared, cost, multiple = setting.free, setting.free.pruner.cost, setting.multiple
    for permille in range(1000, 0, -1):
        counts = {
            name: min(size, multiple * max(1, round(size * permille / 1000 / multiple)))
            for name, size in cost.full_counts.items()
        }
        if cost.cost(counts) <= target * prepared.pruner.full_cost:
            break
    else:
        assert setting.cost != "flops", (
            "even a channel a group costs too much"
        )  # by latency, the nearest counts
    masks = {}
    for name, count in counts.items():
        mine = prepared.smcp.of_group(scores, name)
        masks[name] = torch.zeros(mine.numel(), dtype=torch.bool)
        masks[name][mine.sort(descending=True, stable=True).indices[:count]] = True
    prepared.set_masks(masks)
    return prepared


def _norms(prepared: smcp_fx.PreparedModel) -> Tensor:
    """For each unit, the L2 norm of the filters that write it."""
    squares = torch.zeros_like(prepared.smcp.gathered)
    for layer in prepared.channels.layers:
        weight = prepared.get_parameter(layer.weight).detach().movedim(layer.out_dim, 0)
        places = prepared.smcp.places(layer.output_channels)
        free = places >= 0
        squares.index_add_(0, places[free], weight.square().flatten(1).sum(1)[free])
    return squares.sqrt()


def _noise(setting: Setting) -> Tensor:
    generator = torch.Generator().manual_seed(setting.seed)
    return torch.rand(setting.free.smcp.gathered.shape, generator=generator)
