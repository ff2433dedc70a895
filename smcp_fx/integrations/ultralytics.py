"""Pruning ultralytics' YOLO models in their own trainer.

    class Trainer(PruningTrainer, DetectionTrainer):
        target = 0.5

    YOLO("yolo11n.yaml").train(trainer=Trainer, data="coco8.yaml", epochs=100)

This module neither imports nor changes ultralytics: a `PrunedYolo` has all that its trainer, validator,
predictor and exporter read. Its files (`best.pt`) hold the smaller network; loading them needs this library.
"""

from __future__ import annotations

import copy
import inspect
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smcp_fx.errors import InputError
from smcp_fx.interface.wrapping import unwrapped
from smcp_fx.prepare import prepare, sliced
from smcp_fx.prepared import PreparedModel
from smcp_fx.schedule import Schedule


class NarrowYolo(nn.Module):
    """A YOLO model that outputs one channel of each feature map: callers only read the maps' sizes."""

    def __init__(self, yolo: nn.Module) -> None:
        super().__init__()
        self.yolo = yolo

    def forward(self, images: Tensor) -> Any:
        return _narrow(self.yolo(images))


def _narrow(output: Any) -> Any:
    if isinstance(output, dict):
        return {
            key: [feature[:, :1] for feature in value] if key == "feats" else _narrow(value)
            for key, value in output.items()
        }
    return type(output)(map(_narrow, output)) if isinstance(output, (list, tuple)) else output


class _Description(dict[str, Any]):
    """A model's ``yaml`` that refuses to build a dense network in place of the pruned one."""

    def __getitem__(self, key: str) -> Any:
        if key == "backbone":
            raise InputError(
                "this trainer would build the dense network anew: train a pruned one with the class that pruned it, "
                "a PruningTrainer, train(trainer=...)"
            )
        return super().__getitem__(key)


class PrunedYolo(nn.Module):
    """A model of ultralytics whose forward is ``network``, a prepared or converted graph.

    The plain attributes (``names``, ``stride``, ``args``, ...) and the loss are the original's. ``model`` is
    its head without the layers that ``network`` runs. Pickling converts the model, so that files are small.
    """

    network: nn.Module
    kind: type[nn.Module]
    args: Any
    yaml: Any

    def __init__(self, yolo: nn.Module, network: nn.Module) -> None:
        super().__init__()
        plain = vars(nn.Module()).keys()
        self.__dict__.update({name: value for name, value in vars(yolo).items() if name not in plain})
        self.yaml = _Description(self.yaml)
        self.kind, self.end2end, self.network = type(yolo), getattr(yolo, "end2end", False), network
        head = yolo.get_submodule("model")[-1]  # type: ignore[index]
        nodes: Any = network.graph.nodes  # type: ignore[union-attr]
        called = {f"{node.target}." for node in nodes if node.op in ("call_module", "get_attr")}
        path = f"yolo.model.{len(yolo.get_submodule('model')) - 1}."  # type: ignore[arg-type]
        self.model = nn.ModuleList([_without_layers(head, path, called)])

    @classmethod
    def prepare(
        cls, yolo: nn.Module, image_size: int = 640, batch_size: int = 2, **options: Any
    ) -> PrunedYolo:
        """Prepare a model (``YOLO(...).model``) for images of this size; ``options`` go to `smcp_fx.prepare`.

        A latency is that of ``batch_size`` images of this size; the graph takes all sizes that the model
        takes. Raises the errors of `smcp_fx.prepare`.
        """
        if not hasattr(yolo, "yaml") or not hasattr(yolo, "model"):
            raise InputError(f"this needs the model of a YOLO (YOLO(...).model), not a {type(yolo).__name__}")
        first = next(iter(yolo.parameters()))
        channels = yolo.yaml.get("channels", 3)  # type: ignore[union-attr, operator]
        shape = (batch_size, int(channels), image_size, image_size)
        images = torch.rand(shape, device=first.device, dtype=first.dtype)
        return cls(yolo, prepare(NarrowYolo(yolo), images, **options))

    def convert(self) -> PrunedYolo:
        """Return the smaller model, a replacement for ``YOLO(...).model``."""
        return self if not isinstance(self.network, PreparedModel) else self._with(sliced(self.network))

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return predictions for images, the loss for a batch."""
        return self.loss(x, *args, **kwargs) if isinstance(x, dict) else self.predict(x)

    def predict(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the network's outputs; during an export, only the deployed ones."""
        output = self.network(x)
        return output[0] if getattr(self.model[0], "export", False) else output

    def init_criterion(self) -> Any:
        """Return the original's loss, even outside a trainer, where its settings are a dict."""
        args = vars(self).get("args")  # a classifier has none
        if not isinstance(args, dict):
            return self.kind.init_criterion(self)  # type: ignore[attr-defined]
        self.args = SimpleNamespace(**args)
        try:
            return self.kind.init_criterion(self)  # type: ignore[attr-defined]
        finally:
            self.args = args

    def __getattr__(self, name: str) -> Any:
        """Return methods of the original's class, such as its loss, bound to this model."""
        method = inspect.getattr_static(vars(self).get("kind", object), name, None)
        if isinstance(method, FunctionType) and name not in vars(nn.Module):
            return MethodType(method, self)
        return super().__getattr__(name)

    def fuse(self, *args: Any, **kwargs: Any) -> PrunedYolo:
        """Return the model as it is: runtimes fuse batch norms themselves."""
        return self

    def is_fused(self) -> bool:
        """Say that there is nothing to fuse."""
        return True

    def info(self, *args: Any, **kwargs: Any) -> None:
        """Print the number of parameters."""
        print(f"{self.kind.__name__}: {sum(p.numel() for p in self.parameters()):,} parameters")

    def _with(self, network: nn.Module) -> PrunedYolo:
        other = _empty(type(self))
        other.__dict__.update(vars(self), _modules={**self._modules, "network": network})
        other.__dict__.pop("criterion", None)  # made again, with later settings
        return other

    def _apply(self, fn: Any, recurse: bool = True) -> PrunedYolo:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        head = self.model[0]
        if isinstance(getattr(head, "stride", None), Tensor):
            head.stride = fn(head.stride)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PrunedYolo:
        other = _empty(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __reduce__(self) -> Any:
        return _empty, (type(self),), vars(self.convert())


def _empty(kind: type[PrunedYolo]) -> PrunedYolo:
    return kind.__new__(kind)


def _without_layers(head: nn.Module, path: str, called: set[str]) -> nn.Module:
    """Return a copy of the head with its attributes, but without the layers that the network runs."""
    shell = _bare(head)
    for name, part in head.named_children():
        if not any(target.startswith(f"{path}{name}.") for target in called):
            shell.add_module(name, part)
        else:
            vars(shell)[name] = _bare(part)  # a placeholder, for code that reads its attributes
    return shell


def _bare(part: nn.Module) -> nn.Module:
    """Return a copy with only the plain attributes."""
    bare = copy.copy(part)
    bare._parameters, bare._buffers, bare._modules = {}, {}, {}
    return bare


class PruningTrainer:
    """Prunes models while they train; a base class to name before one of ultralytics' trainers.

    ``target``, ``cost`` and ``options`` go to `smcp_fx.prepare`. The schedule is the paper's, scaled to the
    length of the training. A trainer that gets pruned weights trains them as they are.
    """

    target: ClassVar[float | str] = 0.5
    cost: ClassVar[Any] = "flops"
    options: ClassVar[dict[str, Any]] = {}

    def get_model(self: Any, cfg: Any = None, weights: Any = None, verbose: bool = True) -> PrunedYolo:
        """Return the trainer's model, prepared."""
        if isinstance(weights, PrunedYolo):
            return weights
        model = super().get_model(cfg, weights, verbose)  # type: ignore[misc]
        options = {"target": self.target, "cost": self.cost, **self.options}
        return PrunedYolo.prepare(model, int(self.args.imgsz), **options)

    def optimizer_step(self: Any) -> None:
        """Let the pruner gather the gradients, then step; the averaged model gets new masks."""
        network = getattr(unwrapped(self.model), "network", None)
        if not isinstance(network, PreparedModel):
            return super().optimizer_step()  # type: ignore[misc, no-any-return]
        pruner = network.pruner
        if pruner.schedule is None:
            steps = max(1, len(self.train_loader) // max(1, getattr(self, "accumulate", 1)))
            pruner.schedule = Schedule.scaled(self.epochs, steps)
        solve = pruner.step(self.scaler)
        super().optimizer_step()  # type: ignore[misc]
        if solve is not None and self.ema:
            self.ema.ema.network.set_masks(network.masks)
        return None
