"""The rise of the loss when a group is narrowed: the Fisher quadratic form of its readers' changed weights.

Let D be the change of the outputs of all layers that read a group, once channels are gone and the weights of
the others refitted. Let g_i be the gradients of image i's loss, on labels drawn from the model. The rise is

    1/2 mean over images of  (sum over readers, positions, outputs of  D g_i)^2,

the second-order expansion of the Kullback-Leibler divergence (Martens 2020, "New insights and perspectives on
the natural gradient method", section 9). Unlike the layer-wise sum of squared errors times squared gradients,
it sees that outputs may matter just where inputs are large, and that errors of outputs and positions add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smcp_fx.calibration.batches import Batch, require_finite_gradients, run_batch
from smcp_fx.calibration.elimination import Order, Refit
from smcp_fx.calibration.readers import Reader, Run, watching


class Curvature:
    """Gathers the rise of the loss over batches, for each refit of each group."""

    def __init__(self, network: nn.Module, refits: Mapping[str, tuple[Refit, ...]]) -> None:
        self._network = network
        self._sums: dict[tuple[str, int], Tensor] = {}
        self._images = 0
        self._changes: dict[Reader, list[tuple[tuple[str, int], Tensor, Tensor]]] = {}
        for group, mine in refits.items():
            for refit in mine:
                for reader, change in refit.changes.items():
                    self._changes.setdefault(reader, []).append(((group, refit.count), *change))

    def add(self, batch: Batch, loss: Callable[[Any], Tensor], counted: Tensor) -> None:
        """Run a batch forward and backward, and gather; ``counted`` [images] bool: the images that count."""
        if not self._changes:
            return
        gradients: dict[tuple[str, int], Tensor] = {}

        def see(run: Run) -> Tensor | None:
            y = run.y if run.y.requires_grad else run.y + torch.zeros_like(run.y, requires_grad=True)

            @torch.no_grad()
            def heed(gradient: Tensor) -> None:
                for key, change, offset in self._changes[run.reader]:
                    moved = run.product(change).sub_(run.reader.consumer.along_outputs(offset))
                    # One sum per image, or one per batch if the first dimension does not hold images.
                    split = batch.images if moved.shape[0] % batch.images == 0 else 1
                    sums = torch.linalg.vecdot(*(v.reshape(split, -1) for v in (moved, gradient))).double()
                    gradients[key] = gradients[key] + sums if key in gradients else sums

            y.register_hook(heed)  # type: ignore[no-untyped-call]
            return y

        with watching(self._network, list(self._changes), see), torch.enable_grad():
            outputs = run_batch(self._network, batch)
        loss(outputs).backward()  # type: ignore[no-untyped-call]
        require_finite_gradients(batch, gradients.values())
        images = int(counted.sum())
        self._images += images
        for key, sums in gradients.items():
            if sums.numel() == counted.numel():
                sums = sums * counted.to(sums)
            else:
                sums = sums * (images / batch.images) ** 0.5
            rise = sums.square().sum() * (0.5 * batch.images**2)
            self._sums[key] = self._sums[key] + rise if key in self._sums else rise

    def rises(self, group: str) -> dict[int, float]:
        """Return the rise of the loss by number of units left."""
        return {
            count: float(total) / self._images for (name, count), total in self._sums.items() if name == group
        }


def corrected(order: Order, rises: Mapping[int, float]) -> Order:
    """Return the order with its rises scaled to the given ones at some counts, by geometric interpolation."""
    if order.rises is None or not rises:
        return order
    counts = sorted(rises)
    least = 1e-9 * max(float(order.rises[0]), *rises.values()) or 1.0
    factors = [np.log((rises[count] + least) / (float(order.rises[count]) + least)) for count in counts]
    scale = np.exp(np.interp(np.arange(order.rises.size), counts, factors))
    # More channels never cost more.
    curve = np.maximum.accumulate((scale * order.rises)[::-1])[::-1]
    return replace(order, rises=curve)
