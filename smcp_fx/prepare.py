"""The two verbs users meet: `prepare` a model for pruning, `convert` it to a smaller one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, fx, nn

from smcp_fx.analysis import analyse
from smcp_fx.config import PruningConfig
from smcp_fx.costs.binding import CostModel, bind
from smcp_fx.errors import InputError, TraceError
from smcp_fx.interface.as_traced import CALL, call_of
from smcp_fx.interface.carried import carried_attributes, carry, plain_attributes
from smcp_fx.interface.example_inputs import default_inputs
from smcp_fx.interface.output_types import keep_output_types
from smcp_fx.interface.own_modes import own_modes
from smcp_fx.interface.positional import positional
from smcp_fx.interface.state_keys import keep_in_state
from smcp_fx.interface.wrapping import require_whole, unwrapped
from smcp_fx.kept_channels import Cut, kept_channels, note_cut, still_true
from smcp_fx.masking.masks import META, STATE
from smcp_fx.outcomes import in_mode
from smcp_fx.own_class import resize
from smcp_fx.passes.base import run_pipeline
from smcp_fx.passes.layer_pruning import allow_layer_pruning
from smcp_fx.passes.other_mode import fuses_in_one_mode
from smcp_fx.passes.pipelines import convert_pipeline, fold_pipeline, prepare_pipeline
from smcp_fx.passes.slice_channels import SliceChannels
from smcp_fx.prepared import (
    Preparation,
    PreparedGraph,
    PreparedModel,
    PreparedRegions,
    Tracing,
    prepared_of,
)
from smcp_fx.proof import check_converted, check_prepared
from smcp_fx.pruning.loop_watch import TrainingWarning
from smcp_fx.pruning.state import PruningState
from smcp_fx.regions import run_by_graphs
from smcp_fx.schedule import Schedule
from smcp_fx.serialization.converted import ConvertedModule
from smcp_fx.tracing.copying import copy_modes, deep_copy, sharing
from smcp_fx.tracing.sentences import listed_paths

__all__ = ["ConvertedModule", "PreparedModel", "convert", "prepare"]

Model = TypeVar("Model", bound=nn.Module)

_DEFAULT_TARGET = 0.5


def prepare(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    target: float | str | None = None,
    cost: str | CostModel = "flops",
    schedule: Schedule | None = None,
    config: PruningConfig | None = None,
    leaves: Sequence[str] = (),
    check: bool = True,
) -> PreparedModel:
    """Return a copy of the model that can be pruned while it trains; ``model`` stays as it was.

    Args:
        model: any model that `torch.fx` can trace, in whole or in parts; the rest stays Python (see
            `smcp_fx.regions`; ``prepared.regions`` lists the parts, ``prepared.untraced`` what stopped it).
            A wrapper such as `torch.compile` or `DataParallel` is removed first.
        example_inputs: a tensor, a tuple of the model's inputs, or a dict of them by the names of its forward's
            arguments; an input may itself be a list, tuple or dict of tensors, as in ``([slow, fast],)``. By default
            the model's own ``example_input_array``, timm's ``pretrained_cfg``, or images of the first convolution's
            channels.
        target: the cost to reach: a fraction of the unpruned cost (by default a half), or an absolute cost
            with its unit. `convert` warns if a target was given and the model is still whole.
        cost: "flops", "params", or a cost model such as a `LatencyCost`.
        schedule: when to solve for masks; without one they change only by `PreparedModel.set_masks` and
            `Pruner.solve`.
        config: the method's options.
        leaves: names of modules that stay as they are. They are called without being traced, and the channels
            that they read and write are not pruned.
        check: compare the result with the model on a few images before returning it: in train and eval mode,
            with gradients, and with another batch size.

    Raises `TraceError` for models that cannot be traced, not even in parts worth pruning (the message says which
    module stopped it, and at which line), and for those whose graph would compute something else. Raises `InputError`
    for inputs and options that do not fit.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"prepare needs an nn.Module, not {type(model).__name__}")
    model = unwrapped(model)
    if isinstance(model, PreparedModel):
        raise InputError("the model is prepared already; use it, or convert it first")
    for option, kind in ((config, PruningConfig), (schedule, Schedule)):
        if option is not None and not isinstance(option, kind):
            raise InputError(f"prepare needs a {kind.__name__}, not a {type(option).__name__}: {option!r}")
    _check_tensors(model)
    own, inputs = model, default_inputs(model) if example_inputs is None else example_inputs
    model, inputs = positional(model, inputs)
    prepared = _prepared(model, inputs, target, cost, schedule, config or PruningConfig(), leaves)
    if prepared.regions and model is not own:
        raise InputError(
            f"{type(model).__name__} takes inputs by name only or as *args, and can be traced in parts alone, where "
            "that is not known: wrap the model in one that takes them by position"
        )
    if check:
        check_prepared(model, prepared, inputs)
        for form in prepared.plan.traced.forms:
            check_prepared(model, prepared, form.of(inputs))
    return prepared


def _prepared(
    model: nn.Module,
    inputs: tuple[Any, ...],
    target: float | str | None,
    cost: str | CostModel,
    schedule: Schedule | None,
    config: PruningConfig,
    leaves: Sequence[str],
) -> PreparedModel:
    own = deep_copy(model)
    _check_names(model)
    analysis = analyse(own, inputs, leaves, config)
    traced, channels, joined = analysis.traced, analysis.channels, analysis.joined
    if config.layer_pruning:
        allow_layer_pruning(traced, channels, config.layer_pruning_in)
    if joined is not None and not any(group.free for group in channels.groups):
        parts = listed_paths([region.path for region in joined.regions])
        raise TraceError(f"{joined.stopped['']} In the parts that can be traced ({parts}) no channel may go.")
    network_cost = bind(cost, traced, channels)
    plan = Preparation(
        channels=channels,
        cost=network_cost,
        flops=network_cost if cost == "flops" else bind("flops", traced, channels),
        parameters=network_cost if cost == "params" else bind("params", traced, channels),
        target=_DEFAULT_TARGET if target is None else target,
        config=config,
        schedule=schedule,
        example_inputs=inputs,
        traced=Tracing(traced.assumptions, joined, own_modes(own) if joined is None else None, traced.forms),
        asked=target is not None,
    )
    state = PruningState(channels, traced.module)
    first = next(iter(traced.module.parameters()), None)
    if first is not None:
        state.to(first.device)
    traced.module.add_module(STATE, state)
    run_pipeline(traced.module, prepare_pipeline(channels, config))
    prepared: PreparedModel
    if joined is not None:
        prepared = PreparedRegions(own, traced.module.graph, plan, state)
    else:
        keep_output_types(traced.module.graph, traced.returned)
        prepared = PreparedGraph(traced.module, traced.module.graph, plan, state, type(model).__name__)
        carry(prepared, plain_attributes(model))
        carry(prepared, call_of(model, inputs, traced.forms))
        keep_in_state(own, prepared)
        copy_modes(traced.module, prepared)
    prepared.pruner.warn_of_idle_target(prepared.pruner.target)
    return prepared


def _check_tensors(model: nn.Module) -> None:
    """Raise `InputError` for weights that hold no numbers yet, `TrainingError` for parts of weights."""
    require_whole(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise InputError(f"{name!r} has no shape yet: call the model once, on inputs of its kind, first")
        if tensor.is_meta:
            raise InputError(
                f"{name!r} is on the meta device, and has no numbers: load the weights, or move the model with "
                "model.to_empty(device=...) and initialise it, first"
            )


def _check_names(model: nn.Module) -> None:
    """Raise `InputError` for a part at the model's top whose name means something else on a prepared model."""
    taken = {*dir(PreparedGraph), *dir(ConvertedModule), "graph", "kept", "plan", "pruner", STATE} - set(
        dir(nn.Module)
    )
    held = (model.named_children(), model.named_parameters(recurse=False), model.named_buffers(recurse=False))
    for name in (*(name for parts in held for name, _ in parts), *(STATE,) * hasattr(model, STATE)):
        if name in taken:
            raise InputError(
                f"the model has an attribute {name!r}, a name that prepared models use; rename it"
            )


@overload
def convert(prepared: nn.Module, *, into: None = None, check: bool = True) -> ConvertedModule: ...
@overload
def convert(prepared: nn.Module, *, into: Model, check: bool = True) -> Model: ...
def convert(prepared: nn.Module, *, into: nn.Module | None = None, check: bool = True) -> nn.Module:
    """Return a plain, physically smaller model that computes what the masked model computes.

    Args:
        prepared: stays as it was; it may come wrapped in `DistributedDataParallel`, `DataParallel` or by
            `torch.compile`.
        into: the original, or another model of its class. The result is a copy of it with the sliced widths and
            weights, by `resize`: your class, with its methods and attributes.
        check: compare the two on a few of the example's images.

    Without ``into``, the result is a `GraphModule` (a `ConvertedModule`). It runs, trains, exports and
    unpickles without this library, unless its code branches on a module's mode or on a value. A model traced
    in regions becomes a module of its own class, whose regions run as sliced graphs; it needs this library to
    unpickle.

    A graph has ``kept``, which maps module paths to the positions of the kept input and output channels (two
    lists), and ``widths()``, which gives their numbers. It has the original's plain attributes
    (``num_classes``, ``pretrained_cfg``), except for channel counts that have changed.

    Raises `PassError` if masked and sliced differ, `TrainingError` under FSDP, and the errors of `resize`.
    """
    require_whole(prepared)
    prepared = prepared_of("convert", prepared)
    prepared.pruner.check_finished()
    converted = sliced(prepared)
    if into is None and prepared.plan.traced.modes is not None:
        frozen = [n for n, part in prepared.named_modules() if prepared.training and not part.training]
        warnings.warn(
            f"{type(prepared).__name__} has a train() of its own; the converted model is a plain graph, whose "
            f"train() sets every module. Call eval() on what is to stay frozen{': ' * bool(frozen)}"
            f"{', '.join(map(repr, frozen[:4]))}.",
            TrainingWarning,
            stacklevel=2,
        )
    if fuses_in_one_mode(prepared.graph):
        warnings.warn(
            f"{type(prepared).__name__} fuses weights in one mode alone; the converted model holds the fused ones as "
            "they are now, and training it on would not change them: train the prepared model instead.",
            TrainingWarning,
            stacklevel=2,
        )
    if check:
        check_converted(prepared, converted, prepared.plan.example_inputs)
    if into is None:
        return converted  # of a model traced in regions: a module of its class
    own = resize(deep_copy(into), converted, _example_for(into, prepared), check=check)
    copy_modes(converted, own)
    return own


def _example_for(model: nn.Module, prepared: PreparedModel) -> Any:
    """The example inputs as the original's class takes them: by name if it takes them in another order."""
    inputs, signature = prepared.plan.example_inputs, inspect.signature(model.forward)
    names = [str(node.target) for node in prepared.graph.nodes if node.op == "placeholder"]
    try:
        by_place = [*signature.bind(*inputs).arguments]
    except TypeError:
        return dict(zip(names, inputs, strict=True))
    elsewhere = by_place != names and set(names) <= signature.parameters.keys()  # others precede them
    return dict(zip(names, inputs, strict=True)) if elsewhere else inputs


def sliced(prepared: PreparedModel) -> nn.Module:
    """`convert` at any time, even before the schedule reaches the target, to measure the result."""
    return sliced_graph(prepared)[1]


def sliced_graph(prepared: PreparedModel) -> tuple[fx.GraphModule, nn.Module]:
    """The sliced network as one graph, and as the module that `convert` returns; they share their tensors.

    They are the same object, except for a model that was traced in regions: its graph is the joined one.
    """
    return _plain_graph(prepared, prepared.smcp.keep, slicing=True)


def converted_full(prepared: PreparedModel) -> nn.Module:
    """The network as a plain model with every channel, whatever the masks are now."""
    return _plain_graph(prepared, torch.ones_like(prepared.smcp.keep), slicing=True)[1]


def trained_graph(prepared: PreparedModel) -> tuple[fx.GraphModule, nn.Module]:
    """The network under the masks of the last training step, with all channels, as from `sliced_graph`.

    The masked channels are present, but masked: the weights that read them, and the batch norms behind, never
    saw them active.
    """
    return _plain_graph(prepared, prepared.smcp.trained, slicing=False)


def _plain_graph(
    prepared: PreparedModel, keep: torch.Tensor, slicing: bool
) -> tuple[fx.GraphModule, nn.Module]:
    copied = deep_copy(prepared)
    copied.pruner.retire()
    copied.smcp.keep.copy_(keep)
    copied.smcp.refresh()
    units = copied.smcp.units_kept()
    if isinstance(copied, PreparedRegions):
        module = sharing(copied.python, copied.graph)
    else:
        assert isinstance(copied, PreparedGraph)
        module = ConvertedModule(copied, copied.graph, class_name=type(prepared).__name__)
        copy_modes(prepared, module)
        kept = kept_channels(prepared.channels, units)
        carried = carried_attributes(copied)
        called = {CALL: carried[CALL]} if CALL in carried else {}
        carry(module, still_true(carried, prepared.channels, kept) | called | {"kept": kept})
    passes = convert_pipeline(prepared.channels, units) if slicing else fold_pipeline()
    with in_mode(module, False):  # reading a spectrally normed weight in training changes its buffers
        run_pipeline(module, passes)
    if slicing and hasattr(module, STATE):
        delattr(module, STATE)
    for node in module.graph.nodes:
        node.meta.pop(META, None)
    module.recompile()
    cut: Cut = next((one.cut for one in passes if isinstance(one, SliceChannels)), {})
    if not isinstance(copied, PreparedRegions):
        note_cut(module, cut)
        return module, module
    note_cut(copied.python, cut)
    assert copied.plan.traced.joined is not None
    run_by_graphs(copied.python, module.graph, copied.plan.traced.joined, alone=True)
    return module, copied.python
