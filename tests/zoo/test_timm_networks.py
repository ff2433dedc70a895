"""A selection of timm's families, each with what others and torchvision's lack; tools/sweep_models.py sweeps all."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from models import check_slicing, without_repeats
from timm.models.ghostnet import GhostNet
from timm.models.repghost import RepGhostNet

# (model, pixels a side, share of input channels that is free)
NETWORKS: list[tuple[str, int, float]] = [
    ("skresnet18", 32, 1.0),  # attention over branches that are stacked
    ("resnest14d", 32, 1.0),  # the same over a radix
    ("nf_resnet26", 32, 1.0),  # weights standardised when they are used
    ("resnetv2_50d_evos", 64, 1.0),  # groups of channels viewed with a number that is worked out
    ("tf_mobilenetv3_small_minimal_100", 32, 1.0),  # padding that depends on the size
    ("ghostnet_050", 32, 1.0),
    ("hgnetv2_b0", 32, 1.0),
    ("repghostnet_050", 32, 1.0),
    ("fasternet_t0", 32, 1.0),  # a convolution of a part of the channels
    ("levit_conv_128s", 128, 1.0),  # attention with a bias looked up
    ("vit_tiny_patch16_224", 64, 1.0),  # through layer norms over the kept channels
]


#: With fewer blocks, narrower, and of smaller images: more are only more of the same.
SMALL: dict[str, dict[str, Any]] = {
    "skresnet18": {"layers": [1, 1, 1, 1], "channels": (16, 32, 64, 128)},
    "resnest14d": {"channels": (16, 32, 64, 128)},
    "nf_resnet26": {"depths": (1, 1, 1, 1), "channels": (32, 64, 128, 256)},
    "resnetv2_50d_evos": {"layers": [1, 1, 1, 1], "channels": (128, 256, 512, 1024)},
    "levit_conv_128s": {"depth": (1, 1, 1), "img_size": 128},
    "vit_tiny_patch16_224": {"depth": 2, "img_size": 64},
}
#: A block of each stage of both (kernel, inside, outputs, share of the excitation, stride), of one stage two.
STAGES = [[[3, 16, 16, 0, 1]], [[3, 48, 24, 0, 2]], [[5, 72, 40, 0.25, 2]], [[3, 240, 80, 0, 2], [3, 184, 80, 0, 1]],
          [[5, 672, 160, 0.25, 2]]]  # fmt: skip
GHOSTS: dict[str, Any] = {"ghostnet_050": GhostNet, "repghostnet_050": RepGhostNet}


@pytest.mark.parametrize(("name", "side", "free"), NETWORKS, ids=[name for name, *_ in NETWORKS])
def test_slicing_is_exact(name: str, side: int, free: float) -> None:
    made = (
        GHOSTS[name](STAGES, width=0.5) if name in GHOSTS else timm.create_model(name, **SMALL.get(name, {}))
    )
    model = without_repeats(made)
    prepared = check_slicing(model, (torch.randn(2, 3, side, side),), share=0.7)
    assert prepared.channels.free_share == pytest.approx(free, abs=1e-3)
