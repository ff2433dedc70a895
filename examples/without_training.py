"""Pruning without training: a few batches for importances, one solve, new batch-norm statistics.

python examples/without_training.py
"""

from __future__ import annotations

import torch
from torch import nn
from toy import accuracy, loader, network, train

import smcp_fx


def main() -> nn.Module:
    """Prune a trained network to 70 % of its FLOPs; returns the smaller model."""
    torch.manual_seed(0)
    trained, batches = train(network(), epochs=4), loader()
    # --8<-- [start:prune]
    prepared = smcp_fx.prepare(trained, torch.randn(2, 1, 12, 12), target=0.7)  # no schedule
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.0)  # importances are gathered, no weight changes
    prepared.train()
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(prepared(images), labels).backward()
        prepared.pruner.step()
        optimizer.step()
    prepared.pruner.solve()
    smaller = smcp_fx.convert(prepared)
    torch.optim.swa_utils.update_bn((images for images, _ in batches), smaller)  # batch-norm statistics
    # --8<-- [end:prune]
    print(f"accuracy {accuracy(trained):.1%} before, {accuracy(smaller):.1%} after")
    return smaller


if __name__ == "__main__":
    main()
