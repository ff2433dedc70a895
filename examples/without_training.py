"""Pruning without training: importances from a few batches, a solve, closed-form repair.

python examples/without_training.py
"""

from __future__ import annotations

import torch
from torch import nn
from toy import accuracy, loader, network, train

import smcp_fx


def main() -> nn.Module:
    """Prune a trained network to half of its FLOPs; returns the smaller model."""
    torch.manual_seed(0)
    model, batches = train(network(), epochs=4), loader()
    # --8<-- [start:prune]
    smaller = smcp_fx.compress(model, batches, target=0.5)
    # --8<-- [end:prune]
    # --8<-- [start:parts]
    prepared = smcp_fx.prepare(model, next(iter(batches))[0], target=0.5)
    smcp_fx.gather_importance(prepared, batches)
    smcp_fx.calibration.solve_best(prepared, batches)
    smaller = smcp_fx.convert(prepared)
    report = smcp_fx.repair(smaller, prepared, batches)
    # --8<-- [end:parts]
    print(report)
    print(f"accuracy {accuracy(model):.1%} before, {accuracy(smaller):.1%} after")
    return smaller


if __name__ == "__main__":
    main()
