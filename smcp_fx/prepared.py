"""What `prepare` returns: a model with masks in it, traced as a whole or in regions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from smcp_fx.channels import ChannelGraph
from smcp_fx.config import PruningConfig
from smcp_fx.cost_model import NetworkCost
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.interface.as_traced import CalledAsTraced
from smcp_fx.interface.carried import carried_attributes, carry
from smcp_fx.interface.own_modes import set_own_modes
from smcp_fx.interface.state_keys import keep_in_state
from smcp_fx.interface.wrapping import require_whole, unwrapped, without_wrappers
from smcp_fx.masking.masks import STATE
from smcp_fx.model_summary import model_summary, share_of
from smcp_fx.pruning.pruner import Pruner
from smcp_fx.pruning.state import PruningState
from smcp_fx.regions import Joined, run_by_graphs
from smcp_fx.schedule import Schedule
from smcp_fx.tracing.block_hooks import CalledWithHooks
from smcp_fx.tracing.call_forms import Form
from smcp_fx.tracing.copying import copy_modes, deep_copy


@dataclass(frozen=True)
class Tracing:
    """How a model was traced: what its graph assumes about the inputs, and the parts if it was traced in parts.

    ``forms``: the traced calls that leave out arguments of the example.
    """

    assumptions: tuple[str, ...] = ()
    joined: Joined | None = None
    modes: nn.Module | None = None  # see `own_modes`
    forms: tuple[Form, ...] = ()


@dataclass(frozen=True)
class Preparation:
    """What a prepared model was made with; shared by its copies.

    ``target`` is as given; ``asked``: whether it was given, and is not the default.
    """

    channels: ChannelGraph
    cost: NetworkCost
    flops: NetworkCost
    parameters: NetworkCost
    target: float | str
    config: PruningConfig
    schedule: Schedule | None
    example_inputs: tuple[Any, ...]
    traced: Tracing
    asked: bool = True


class PreparedModel(CalledAsTraced):
    """A model with channel masks and batch-norm scales in it; called and trained like the original.

    Its parameters keep their names. ``channels`` is the channel graph, ``pruner`` goes into the training
    loop, ``masks`` and `set_masks` read and set masks by hand.
    """

    smcp: PruningState
    plan: Preparation
    pruner: Pruner
    graph: fx.Graph

    @property
    def channels(self) -> ChannelGraph:
        """The network's channel graph."""
        return self.plan.channels

    @property
    def masks(self) -> dict[str, Tensor]:
        """Every group's mask by name: [size] bool, true where a unit is kept (copies)."""
        return self.smcp.masks

    @property
    def regions(self) -> tuple[str, ...]:
        """The modules that were traced one by one; empty when the model was traced as a whole."""
        joined = self.plan.traced.joined
        return () if joined is None else tuple(region.path for region in joined.regions)

    @property
    def untraced(self) -> dict[str, str]:
        """Why modules were not traced, by path ("" is the model itself); empty when it was traced as a whole."""
        return {} if self.plan.traced.joined is None else dict(self.plan.traced.joined.stopped)

    def set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Set groups' masks: any bool tensor of the group's size that keeps a unit. Batch-norm scales follow.

        Raises `InputError` (and changes nothing) for unknown groups, wrong shapes, masks that keep nothing,
        and pinned groups.
        """
        self.smcp.set_masks(masks)

    def summary(self) -> str:
        """Return tables of the layers and groups: what is kept of each, its parameters and multiply-adds."""
        counts = self.pruner.counts
        parts = model_summary(
            self.channels, self.smcp.units_kept(), self.plan.flops, self.plan.parameters, counts
        )
        return f"{self!r}\n\n{parts}"

    def __repr__(self) -> str:
        counts, free = self.pruner.counts, sum(group.free for group in self.channels.groups)
        costs = ", ".join(share_of(cost, counts) for cost in (self.plan.flops, self.plan.parameters))
        name = type(self.python if isinstance(self, PreparedRegions) else self).__name__
        return f"<{name}, prepared: {costs}; {free} of {len(self.channels.groups)} groups free>"

    __str__ = __repr__

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Also take state dicts of wrapped models, and of models that are not prepared: the masks then stay."""
        without_wrappers(state_dict, prefix, self.state_dict())
        if not any(name.startswith(f"{prefix}{STATE}.") for name in state_dict):
            own = self.smcp.state_dict()
            state_dict.update({f"{prefix}{STATE}.{name}": tensor for name, tensor in own.items()})
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; raises `AssumptionError` for an input of another kind than the example."""
        try:
            return super().__call__(*args, **kwargs)
        except RuntimeError as error:
            if "DTensor" in str(error):  # parts of the model are sharded, and the graph reads their weights
                require_whole(self)
            raise

    def __reduce__(self) -> Any:
        raise CheckpointError(
            "a prepared model is not pickled: save prepared.state_dict() and load it into a model prepared the "
            "same way, or save the converted model with smcp_fx.save"
        )


def prepared_of(verb: str, model: Any) -> PreparedModel:
    """Return the prepared model without wrappers; raises `InputError` for another."""
    inner = unwrapped(model)
    if not isinstance(inner, PreparedModel):
        raise InputError(f"{verb} needs what prepare returned, not {type(inner).__name__}")
    return inner


class PreparedGraph(CalledWithHooks, PreparedModel, fx.GraphModule):
    """A model that was traced as a whole."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, plan: Preparation, state: PruningState, name: str
    ) -> None:
        super().__init__(root, graph, class_name=name)
        self.plan = plan
        self.add_module(STATE, state)
        self.pruner = Pruner(
            self, plan.channels, state, plan.cost, plan.target, plan.config, plan.schedule, plan.asked
        )

    def train(self, mode: bool = True) -> PreparedGraph:
        """As the original's."""
        super().train(mode)
        if self.plan.traced.modes is not None:
            set_own_modes(self.plan.traced.modes, self, mode)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedGraph:
        root = nn.Module()
        root.training = self.training
        for part in ("_modules", "_parameters", "_buffers"):
            setattr(root, part, deep_copy(getattr(self, part), memo))
        root._non_persistent_buffers_set = set(self._non_persistent_buffers_set)
        state = root.get_submodule(STATE)
        assert isinstance(state, PruningState)
        copied = PreparedGraph(root, copy.deepcopy(self.graph), self.plan, state, type(self).__name__)
        carry(copied, carried_attributes(self))
        keep_in_state(root, copied)
        copy_modes(self, copied)
        copied.pruner.go_on_from(self.pruner)
        memo[id(self)] = copied
        return copied


class PreparedRegions(PreparedModel):
    """A model whose own Python calls regions that are graphs.

    ``python`` is the copy of the model that does; its submodules, parameters and buffers are this module's, and its
    other attributes and methods can be reached through this module. ``graph`` is the regions' joined graph.
    """

    python: nn.Module

    def __init__(self, python: nn.Module, graph: fx.Graph, plan: Preparation, state: PruningState) -> None:
        super().__init__()
        for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = python.__dict__[table]
        self.__dict__["python"] = python  # not a submodule: the names in the state dict stay
        self.training = python.training
        self.graph = graph
        self.plan = plan
        self.add_module(STATE, state)
        assert plan.traced.joined is not None
        run_by_graphs(python, graph, plan.traced.joined)
        self.pruner = Pruner(
            self, plan.channels, state, plan.cost, plan.target, plan.config, plan.schedule, plan.asked
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's."""
        return self.python(*args, **kwargs)

    def train(self, mode: bool = True) -> PreparedRegions:
        """As the original's."""
        self.python.train(mode)
        self.training = self.python.training
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "python" not in self.__dict__:
                raise
            return getattr(self.__dict__["python"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedRegions:
        python = deep_copy(self.python, memo)
        state = python.get_submodule(STATE)
        assert isinstance(state, PruningState)
        copied = PreparedRegions(python, copy.deepcopy(self.graph), self.plan, state)
        copied.pruner.go_on_from(self.pruner)
        memo[id(self)] = copied
        return copied
