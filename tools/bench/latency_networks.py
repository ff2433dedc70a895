"""Networks for the latency benchmark: random prunings, and their engines without an export each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import torch
import torchvision
from torch import Tensor, nn

import smcp_fx
from smcp_fx.backends.base import Engine
from smcp_fx.backends.onnx.block_shapes import BlockShapes, built_shapes
from smcp_fx.backends.onnx.blocks import Templates
from smcp_fx.backends.onnxruntime.backend import OnnxRuntimeEngine
from smcp_fx.costs.binding import CostModel
from smcp_fx.prepare import PreparedModel

MODELS = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "vgg16_bn",
    "densenet121",
    "efficientnet_b0",
    "shufflenet_v2_x1_0",
)
#: Name: (side of the image, batch).
SETTINGS = {"224x1": (224, 1), "64x1": (64, 1), "64x32": (64, 32)}


#: The smallest share of the units that random prunings have on average.
SMALLEST = 0.15


@dataclass
class Network:
    """One model at one setting, prepared; engines have so many ``threads``."""

    prepared: PreparedModel
    inputs: tuple[Tensor, ...]
    threads: int = 1
    templates: Templates = field(default_factory=Templates)
    shapes: dict[tuple[tuple[str, int], ...], BlockShapes] = field(default_factory=dict)

    @classmethod
    def make(cls, model: str, setting: str, cost: CostModel) -> Network:
        """Build the model with random weights; what the cost's table lacks is measured."""
        torch.manual_seed(0)
        side, batch = SETTINGS[setting]
        inputs = (torch.randn(batch, 3, side, side),)
        network = torchvision.models.get_model(model).eval()
        for module in network.modules():  # an export has equal parameters once: as a template, too few
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                    nn.init.uniform_(tensor, 0.5, 1.5)
        return cls(smcp_fx.prepare(network, inputs, cost=cost), inputs)

    def pruned(self, counts: Mapping[str, int]) -> nn.Module:
        """The network with so many units of each group, the first ones."""
        free = (group for group in self.prepared.channels.groups if group.free)
        self.prepared.set_masks({g.name: torch.arange(g.size) < counts[g.name] for g in free})
        return smcp_fx.convert(self.prepared).eval()

    def model(self, counts: Mapping[str, int]) -> onnx.ModelProto:
        """The pruned network's model with random weights; from one export for all counts where that holds.

        The latency does not depend on the weights' values, and an export takes many times what a measurement does.
        """
        key = tuple(sorted(counts.items()))
        if key not in self.shapes:  # a network is measured in several sessions
            self.shapes[key] = built_shapes(self.pruned(counts), self.inputs, "network")
        return self.templates.model(self.shapes[key], lambda: (self.pruned(counts), self.inputs))

    def engine(self, counts: Mapping[str, int]) -> Engine:
        """An engine of that model."""
        data = self.model(counts).SerializeToString()
        return OnnxRuntimeEngine(data, self.inputs, self.threads)

    @property
    def permitted(self) -> dict[str, tuple[int, ...]]:
        """Every permitted count of each free group, dominated ones included."""
        return {group.name: group.permitted for group in self.prepared.channels.groups if group.free}

    def random_counts(self, index: int) -> dict[str, int]:
        """Counts number ``index``: a random share for the whole network, each group about it."""
        rng = np.random.default_rng([7, index])
        return self._about(rng.uniform(SMALLEST, 1.0), rng)

    def _about(self, share: float, rng: np.random.Generator) -> dict[str, int]:
        """Counts of about a share of each group's units: half of it to one and a half."""
        counts = {}
        for name, allowed in self.permitted.items():
            wanted = min(share * rng.uniform(0.5, 1.5), 1.0) * allowed[-1]
            counts[name] = int(min(allowed, key=lambda count: abs(count - wanted)))
        return counts

    def random_values(self, seed: int, permitted: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Values of each permitted count, as for units of exponentially distributed importances."""
        rng = np.random.default_rng([11, seed])
        values = {}
        for name, allowed in self.permitted.items():
            units = np.sort(rng.exponential(rng.uniform(0.3, 1.0), allowed[-1]))[::-1]
            values[name] = np.cumsum(units)[np.asarray(permitted[name]) - 1]
        return values
