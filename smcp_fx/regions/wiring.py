"""Which tensors go straight from one region into another, as seen in an example run."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smcp_fx.regions.carriers import Carrier, is_carrier, maps_of
from smcp_fx.regions.finding import Region, bound_arguments, watched
from smcp_fx.tracing.example_runs import plain, run_eager, unchanged
from smcp_fx.tracing.gradients import checkpoints_called

_LOG = logging.getLogger("smcp_fx.regions")

#: What Python may ask of a tensor without reading its values. (Code that computes with `x.shape[1]` will see the
#: pruned model's sizes, as it would in a model that was built that way.)
_HARMLESS = {
    getattr(Tensor, name).__get__
    for name in "shape dtype device ndim requires_grad is_cuda layout is_mps is_xpu is_quantized is_sparse".split()
} | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.__len__, Tensor.get_device, Tensor.is_complex}


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: output ``place`` of call number ``call``; from Python if ``call`` is None.

    ``maps``: the (call, place) of each output that a carrier took the channels from (`regions.carriers`).
    """

    call: int | None
    place: int = 0
    maps: tuple[tuple[int, int], ...] = ()


@dataclass
class Passage:
    """One call of a region: its input tensors (kept alive, so that their ids stay unique) and its outputs."""

    region: Region
    nth: int
    inputs: list[Tensor]
    versions: list[int]
    copies: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    output_copies: list[Tensor] = field(default_factory=list)
    gradients: bool = True  # whether any reach it


@dataclass(frozen=True)
class Wiring:
    """The calls in order; ``sources[i]``: of call i's inputs; ``read[i]``: the outputs of call i that Python reads.

    ``bared``: the paths of regions whose parameters or buffers are read by Python outside of the regions; ``frozen``:
    those of regions that are only called without gradients, or only read through `detach()`.
    """

    calls: tuple[Passage, ...]
    sources: tuple[tuple[Source, ...], ...]
    read: tuple[frozenset[int], ...]
    bared: frozenset[str]
    frozen: frozenset[str]


class _Watcher:
    """Notes what happens to tensors outside the regions."""

    def __init__(self) -> None:
        self.inside = 0
        self.touched: dict[int, Tensor] = {}
        self.carriers: list[Carrier] = []

    def touch(self, *trees: Any) -> None:
        if not self.inside:
            for leaf in pytree.tree_leaves(trees):
                if isinstance(leaf, Tensor):
                    self.touched[id(leaf)] = leaf


class _Functions(TorchFunctionMode):
    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            self.watcher.touch(args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what does not go through a torch function, mainly custom operators."""

    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watcher.touch(args, kwargs or {})
        return func(*args, **(kwargs or {}))


def observe(model: nn.Module, inputs: tuple[Any, ...], regions: tuple[Region, ...]) -> Wiring:
    """Run the model in eval mode, and in train mode if it takes the inputs there, and return its wiring.

    The calls are those of the eval run; what Python reads in either run counts as read.
    """
    calls, watcher = _run(model, inputs, regions)
    bared = _bared(model, regions, watcher)
    with unchanged(model):  # some models need targets in train(), and inference code may refuse gradients
        as_trained = _tried(model, inputs, regions, training=True, gradients=True)
        trained = as_trained or _tried(model, inputs, regions, training=True)
        live = as_trained or _tried(model, inputs, regions, gradients=True)
    carried = _carried([(calls, watcher), *([trained] if trained else [])])
    read = _read(calls, watcher)
    also = _read(*trained) if trained else {}
    bared |= _bared(model, regions, trained[1]) if trained else set()
    frozen = (
        {call.region.path for call in live[0]} - {c.region.path for c in live[0] if c.gradients}
        if live
        else ()
    )
    produced: dict[int, tuple[int, int]] = {}
    sources: list[tuple[Source, ...]] = []
    places: list[frozenset[int]] = []
    numbers = {id(call): index for index, call in enumerate(calls)}
    for call in calls:
        seen = read[_key(call)] | also.get(_key(call), set())
        if call.region.output is None:  # it returns unknown other tensors in train mode
            seen = set(range(len(call.outputs)))
        places.append(frozenset(seen))
        origins = []
        for tensor, version in zip(call.inputs, call.versions, strict=True):
            maker, place = produced.get(id(tensor), (None, 0))
            straight = maker is not None and calls[maker].output_versions[place] == version
            straight = straight and place not in places[maker or 0]
            maps = () if straight else _maps(carried.get(id(tensor)), version, produced)
            origins.append(Source(maker, place) if straight else Source(None, maps=maps))
        sources.append(tuple(origins))
        for place, tensor in enumerate(call.outputs):
            produced[id(tensor)] = (numbers[id(call)], place)
    used = {(source.call, source.place) for origins in sources for source in origins}
    used |= {end for origins in sources for source in origins for end in source.maps}
    for index, call in enumerate(calls):  # code that did not run may read an output that no call took
        idle = {place for place in range(len(call.outputs)) if (index, place) not in used}
        places[index] = places[index] | idle
    return Wiring(tuple(calls), tuple(sources), tuple(places), frozenset(bared), frozenset(frozen))


def _carried(runs: list[tuple[list[Passage], _Watcher]]) -> dict[int, Carrier]:
    """Return the first run's calls of carriers, by the id of the result, if only regions read the result.

    Note the maps of all other calls as read by Python.
    """
    lost: set[tuple[str, int]] = set()
    for calls, watcher in runs:
        made = {
            id(tensor): version
            for call in calls
            for tensor, version in zip(call.outputs, call.output_versions, strict=True)
        }
        for carrier in watcher.carriers:
            of_regions = [made.get(id(one)) for one in carrier.maps] == carrier.versions
            if not of_regions or carrier.pooled is None or id(carrier.pooled) in watcher.touched:
                lost.add((carrier.path, carrier.nth))
    for _, watcher in runs:
        for carrier in watcher.carriers:
            if (carrier.path, carrier.nth) in lost:
                watcher.touch(carrier.maps)
    return {
        id(carrier.pooled): carrier
        for carrier in runs[0][1].carriers
        if (carrier.path, carrier.nth) not in lost
    }


def _maps(
    carrier: Carrier | None, version: int, produced: dict[int, tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return which outputs of calls a carrier has read, if its result is unchanged since."""
    if carrier is None or carrier.pooled is None or _version(carrier.pooled) != version:
        return ()
    return tuple(produced[id(one)] for one in carrier.maps)


def _key(call: Passage) -> tuple[str, int]:
    return call.region.path, call.nth


def _read(calls: list[Passage], watcher: _Watcher) -> dict[tuple[str, int], set[int]]:
    return {
        _key(call): {place for place, tensor in enumerate(call.outputs) if id(tensor) in watcher.touched}
        for call in calls
    }


def _bared(model: nn.Module, regions: tuple[Region, ...], watcher: _Watcher) -> set[str]:
    def held(path: str) -> list[Tensor]:
        module = model.get_submodule(path)
        return [*module.parameters(), *module.buffers()]

    return {region.path for region in regions if any(id(t) in watcher.touched for t in held(region.path))}


def _tried(
    model: nn.Module,
    inputs: tuple[Any, ...],
    regions: tuple[Region, ...],
    *,
    training: bool = False,
    gradients: bool = False,
) -> tuple[list[Passage], _Watcher] | None:
    """The result of `_run`; None if the model fails."""
    try:
        return _run(model, inputs, regions, training=training, gradients=gradients)
    except Exception as error:  # the model's own
        how = f"training={training}, gradients={gradients}"
        _LOG.debug("run with %s, the model said %s: %s", how, type(error).__name__, error)
        return None


def _run(
    model: nn.Module,
    inputs: tuple[Any, ...],
    regions: tuple[Region, ...],
    *,
    training: bool = False,
    gradients: bool = False,
) -> tuple[list[Passage], _Watcher]:
    by_path = {region.path: region for region in regions}
    calls: list[Passage] = []
    open_calls: list[Passage] = []
    numbers: dict[str, int] = defaultdict(int)
    watcher = _Watcher()

    def enter(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watcher.inside += 1
        region = by_path[path]
        leaves = pytree.tree_leaves(bound_arguments(module.forward, args, kwargs))
        tensors = region.form.tensors(leaves)
        copies = [tensor.detach().clone() for tensor in tensors]
        call = Passage(region, numbers[path], tensors, list(map(_version, tensors)), copies)
        call.gradients = torch.is_grad_enabled()
        numbers[path] += 1
        calls.append(call)
        open_calls.append(call)

    def leave(path: str, module: nn.Module, output: Any) -> None:
        call = open_calls.pop()
        call.outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        call.output_versions = list(map(_version, call.outputs))
        call.output_copies = [tensor.detach().clone() for tensor in call.outputs]
        watcher.inside -= 1

    def enter_carrier(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watcher.inside += 1
        maps = maps_of(module, args, kwargs)
        watcher.carriers.append(Carrier(path, numbers[path], maps, list(map(_version, maps))))
        numbers[path] += 1

    def leave_carrier(path: str, module: nn.Module, output: Any) -> None:
        watcher.carriers[-1].pooled = output
        watcher.inside -= 1

    modules = {path: model.get_submodule(path) for path in by_path}
    within = tuple(f"{path}." for path in by_path)
    carriers = {
        path: module
        for path, module in model.named_modules()
        if is_carrier(module) and not path.startswith(within)
    }

    def run(*args: Any) -> Any:
        model.train(training)
        with (
            torch.set_grad_enabled(gradients),
            checkpoints_called(every=True),
            _Functions(watcher),
            _Operators(watcher),
        ):
            output = model(*args)
        if training and gradients:
            _note_gradients(calls, output)
        return output

    with watched(modules, enter, leave), watched(carriers, enter_carrier, leave_carrier):
        result = run_eager(model, inputs, run)
    watcher.touch(result)
    return calls, watcher


def _note_gradients(calls: list[Passage], result: Any) -> None:
    """Note which calls get gradients from the model's outputs in training."""
    ends = [leaf for leaf in pytree.tree_leaves(plain(result)) if _learns(leaf)]
    made = [(call, tensor) for call in calls for tensor in call.outputs if _learns(tensor)]
    if not ends or not made:
        return
    gradients = torch.autograd.grad(
        ends, [tensor for _, tensor in made], [torch.ones_like(end) for end in ends], allow_unused=True
    )
    reached = {id(call) for (call, _), gradient in zip(made, gradients, strict=True) if gradient is not None}
    for call, _ in made:
        call.gradients = id(call) in reached


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _version(tensor: Tensor) -> int:
    """How often the tensor was written into; 0 if it was made in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version
