"""The two verbs users meet: `prepare` a model for pruning, `convert` it to a smaller one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from smcp_fx.channels import ChannelGraph, build
from smcp_fx.config import PruningConfig
from smcp_fx.cost_model import NetworkCost
from smcp_fx.costs import CostModel, absolute_target, bind
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.masking import META, STATE
from smcp_fx.passes.base import run_pipeline
from smcp_fx.passes.pipelines import convert_pipeline, prepare_pipeline
from smcp_fx.pruner import Pruner
from smcp_fx.schedule import Schedule
from smcp_fx.state import PruningState
from smcp_fx.tracing import Traced, as_inputs, default_inputs, trace


@dataclass(frozen=True)
class Plan:
    """What a prepared model was made with; shared by its copies."""

    traced: Traced
    channels: ChannelGraph
    cost: NetworkCost
    target: float
    config: PruningConfig
    schedule: Schedule | None
    example_inputs: tuple[Any, ...]


class PreparedModel(fx.GraphModule):
    """A model with channel masks and batch-norm scales in its graph; called and trained like the original.

    Its parameters keep their names. ``channels`` is the channel graph, ``pruner`` goes into the training
    loop, ``masks`` and `set_masks` read and set masks by hand.
    """

    smcp: PruningState

    def __init__(self, root: nn.Module, graph: fx.Graph, plan: Plan, state: PruningState, name: str) -> None:
        super().__init__(root, graph, class_name=name)
        self.plan = plan
        self.add_module(STATE, state)
        self.pruner = Pruner(self, plan.cost, plan.target, plan.config, plan.schedule)

    @property
    def channels(self) -> ChannelGraph:
        """The network's channel graph."""
        return self.plan.channels

    @property
    def masks(self) -> dict[str, Tensor]:
        """Every group's mask by name: [size] bool, true where a unit is kept (copies)."""
        return self.smcp.masks

    def set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Set groups' masks: any bool tensor of the group's size that keeps a unit. Batch-norm scales follow.

        Raises `InputError` (and changes nothing) for unknown groups, wrong shapes, masks that keep nothing,
        and pinned groups.
        """
        self.smcp.set_masks(masks)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedModel:
        root = nn.Module()
        root.training = self.training
        for part in ("_modules", "_parameters", "_buffers"):
            setattr(root, part, copy.deepcopy(getattr(self, part), memo))
        state = root.get_submodule(STATE)
        assert isinstance(state, PruningState)
        copied = PreparedModel(root, copy.deepcopy(self.graph), self.plan, state, type(self).__name__)
        _copy_modes(self, copied)
        copied.pruner.correction = self.pruner.correction
        copied.pruner.history = list(self.pruner.history)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        raise CheckpointError(
            "a prepared model is not pickled: save prepared.state_dict() and load it into a model prepared the "
            "same way, or save the converted model with smcp_fx.save"
        )


def prepare(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | None = None,
    *,
    target: float | str = 0.5,
    cost: str | CostModel = "flops",
    schedule: Schedule | None = None,
    config: PruningConfig | None = None,
) -> PreparedModel:
    """Return a copy of the model that can be pruned while it trains; ``model`` stays as it was.

    Args:
        model: any model `torch.fx` can trace.
        example_inputs: a tensor or a tuple of the model's inputs; by default the model's own
            ``example_input_array``, timm's ``pretrained_cfg``, or an image of the first convolution's
            channels.
        target: what to reach: a fraction of the unpruned cost, or an absolute cost with its unit.
        cost: "flops", "params", or a cost model such as a `LatencyTable`.
        schedule: when to solve for masks; without one they change only by `PreparedModel.set_masks` and
            `Pruner.solve`.
        config: the method's options.

    Raises `TraceError` for models that fx cannot trace, `InputError` for inputs and options that do not fit.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"prepare needs an nn.Module, not {type(model).__name__}")
    if isinstance(model, PreparedModel):
        raise InputError("the model is prepared already; use it, or convert it first")
    config = config or PruningConfig()
    inputs = default_inputs(model) if example_inputs is None else as_inputs(example_inputs)
    traced = trace(copy.deepcopy(model), inputs)
    if hasattr(traced.module, STATE):
        raise InputError(f"the model has an attribute {STATE!r}, a name that prepared models use; rename it")
    exclude = config.exclude
    channels = build(traced.module, traced.values, multiple=config.multiple, exclude=exclude)
    if config.keep_first_convolution and channels.layers:
        exclude = (*exclude, channels.layers[0].path)
        channels = build(traced.module, traced.values, multiple=config.multiple, exclude=exclude)
    network_cost = bind(cost, traced, channels)
    full = network_cost.cost(network_cost.full_counts)
    plan = Plan(
        traced=Traced(fx.GraphModule(nn.Module(), fx.Graph()), traced.values),
        channels=channels,
        cost=network_cost,
        target=absolute_target(target, full, network_cost.unit),
        config=config,
        schedule=schedule,
        example_inputs=inputs,
    )
    state = PruningState(channels)
    first = next(iter(traced.module.parameters()), None)
    if first is not None:
        state.to(first.device)
    traced.module.add_module(STATE, state)
    run_pipeline(traced.module, prepare_pipeline(channels, config))
    prepared = PreparedModel(traced.module, traced.module.graph, plan, state, type(model).__name__)
    _copy_modes(traced.module, prepared)
    return prepared


def convert(prepared: PreparedModel) -> fx.GraphModule:
    """Return a plain, physically smaller `GraphModule` that computes what the masked model computes.

    ``prepared`` stays as it was. The result needs nothing of this library to run, train, save or export.
    """
    if not isinstance(prepared, PreparedModel):
        raise InputError(f"convert needs what prepare returned, not {type(prepared).__name__}")
    copied = copy.deepcopy(prepared)
    module = fx.GraphModule(copied, copied.graph, class_name=type(prepared).__name__)
    _copy_modes(prepared, module)
    run_pipeline(module, convert_pipeline(prepared.channels, prepared.smcp.units_kept()))
    if hasattr(module, STATE):
        delattr(module, STATE)
    for node in module.graph.nodes:
        node.meta.pop(META, None)
    module.recompile()
    return module


def _copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Give each module of ``target`` the train/eval mode of the module of its name in ``source``."""
    modes = {name: module.training for name, module in source.named_modules()}
    for name, module in target.named_modules():
        module.training = modes.get(name, source.training)
