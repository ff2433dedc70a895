"""The tensors that a model's Python passes to its regions: the inputs of the joined graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import InputError
from smcp_fx.regions.finding import bound_arguments, watched
from smcp_fx.regions.running import Joined, RegionForward


def joined_inputs(
    model: nn.Module, joined: Joined, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Run a model whose regions are graphs, and return the tensors for the joined graph's placeholders, in order.

    Raises `InputError` if the regions are called in another way than in the example.
    """
    forms = {region.path: region.form for region in joined.regions}
    modules = {path: model.get_submodule(path) for path in forms}
    seen: list[tuple[str, list[Tensor]]] = []

    def enter(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = vars(module).get("forward")
        if isinstance(forward, RegionForward):
            bound = forward.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments: Any = (bound.args, bound.kwargs)
        else:
            arguments = bound_arguments(module.forward, args, kwargs)
        leaves, structure = pytree.tree_flatten(arguments)
        if structure != forms[path].structure:
            raise InputError(f"{path!r} is called with other arguments than in the example")
        # The arguments may be changed in place later.
        seen.append((path, [tensor.detach().clone() for tensor in forms[path].tensors(leaves)]))

    with torch.no_grad(), watched(modules, enter, lambda path, module, output: None):
        model(*args, **kwargs)
    if [path for path, _ in seen] != [path for path, _ in joined.calls]:
        raise InputError(
            f"the traced parts are called {len(seen)} times, in another order or number than the {len(joined.calls)} "
            "calls of the example that the model was prepared with"
        )
    places = [
        tensors[place] for (_, tensors), (_, own) in zip(seen, joined.calls, strict=True) for _, place in own
    ]
    return tuple(places)
