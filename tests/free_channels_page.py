"""Write what is free and what is not of the networks of `AWKWARD`: docs/records/free_channels.jsonl, and its page.

    python tests/free_channels_page.py

`tests/channels/test_channels.py` holds every line of the record against the network that it tells of.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models import AWKWARD, Case, randomise

import smcp_fx
from smcp_fx.channels.graph import ChannelGraph
from smcp_fx.channels.trail import INPUT
from smcp_fx.config import MethodConfig

DOCS = Path(__file__).parent.parent / "docs"
RECORD, PAGE = DOCS / "records" / "free_channels.jsonl", DOCS / "reference" / "free_channels.md"
#: The files of networks, in the page's order, and what each is about.
KINDS = {
    "models_layers": "Layers, norms and gates",
    "models_statistics": "Norms and statistics over channels",
    "models_attention": "Attention modules of torch, attention among channels",
    "models_products": "Products, attention by hand",
    "models_learned": "Learned keys, positions and shares",
    "models_movement": "Concatenations, splits, shuffles and views",
    "models_slices": "Slices, single channels and look-ups",
    "models_wiring": "Shared modules, unusual inputs and outputs",
    "models_weights": "Weights computed from parameters",
    "models_overwritten": "Weights that a forward writes into",
    "models_running": "Averages and ranges that training gathers in buffers",
    "models_mixed": "Weights computed from the input",
    "models_generated": "Weights that another network makes, and statistics of weights",
    "models_stacks": "Stacks of matrices that are one parameter",
    "models_windows": "Windows, sampling and unpooling",
    "models_folded": "Channels in the batch",
    "models_filled": "Zeros, and tensors filled piece by piece",
    "models_places": "Graphs, points and codes: what is read and written at places",
    "models_broadcasts": "Broadcasts beside channels that moved",
    "models_recurrent": "Recurrent layers",
    "models_spectra": "Fourier transforms and complex numbers",
    "models_shapes": "Forwards that ask about shapes",
}
_HEAD = """# What is free, by kind

The tests prune {networks} small networks: two convolutions or so, and between them an operation or a few. Each is
sliced and held against itself under masks. In {free} of them all channels are free. The others are below, with the
reason of most of their channels that stay; *free* is the share of the dense layers' input channels, the network's
inputs left out.

`docs/records/free_channels.jsonl` has a line for each network; `python tests/free_channels_page.py` writes it, and
this page from it. [What to do about the rest](../guides/what_cannot_be_pruned.md);
[whole models](../results/models.md).

| kind | networks | all free |
|---|---|---|
"""


def entry(case: Case, prepared: smcp_fx.PreparedModel) -> dict[str, Any]:
    """The record's line of a network: its kind and name, the share that is free, and why most of the rest stays.

    ``state`` stands for what a state dict holds and how masks lie in it. Where it changes, old ones no longer load.
    """
    channels = prepared.channels
    name, free = case.name.replace("_", " ").replace(" s ", "'s "), round(channels.free_share, 2)
    stays = "" if channels.free_share == 1 else _reason(channels)
    kind = case.build.__module__
    return {"kind": kind, "network": name, "free": free, "stays": stays, "state": _state(prepared)}


def entries() -> list[dict[str, Any]]:
    """The lines of the record."""
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def page(found: Sequence[dict[str, Any]]) -> str:
    """The page of a record: how many networks of each kind are free, and what stays of the others."""
    whole = [one for one in found if not one["stays"]]
    text, rest = _HEAD.format(networks=len(found), free=len(whole)), ""
    for kind, title in KINDS.items():
        mine = [one for one in found if one["kind"] == kind]
        stays = [one for one in mine if one["stays"]]
        text += f"| {title} | {len(mine)} | {len(mine) - len(stays)} |\n"
        if stays:
            rest += f"\n## {title}\n\n| network | free | most of what stays |\n|---|---|---|\n"
            rest += "".join(f"| {one['network']} | {one['free']:.2f} | {one['stays']} |\n" for one in stays)
    return text + rest


@torch.no_grad()
def _state(prepared: smcp_fx.PreparedModel) -> str:
    """A checksum of the state dict's names and shapes, and of the groups' masks where some units are gone."""
    lines = sorted(f"{name} {list(tensor.shape)}" for name, tensor in prepared.state_dict().items())
    keep = prepared.smcp.keep
    before = keep.clone()
    keep.copy_(torch.arange(keep.numel()) * 40503 // 32 % 2 == 1)
    lines += sorted(f"{name} {mask.int().tolist()}" for name, mask in prepared.masks.items())
    keep.copy_(before)
    return f"{zlib.crc32(chr(10).join(lines).encode()):08x}"


def _reason(channels: ChannelGraph) -> str:
    """Why most of the channels stay that a dense layer reads."""
    dense = [layer for layer in channels.layers if layer.kind == "dense"]
    units = (unit for layer in dense for unit in channels.units.of(layer.in_labels).tolist())
    reasons = (channels.units.why.get(unit) for unit in units)
    texts = Counter(found[0].text for found in reasons if found and found[0].kind != INPUT)
    if not texts:
        return "no layer whose weight is a parameter reads any"
    return re.sub(r"(?<!\w)'[^']*'", "...", texts.most_common(1)[0][0]).replace("|", "/")


def main() -> int:
    """Trace every network; write the record, and the page."""
    told = []
    for case in sorted(AWKWARD, key=lambda case: list(KINDS).index(case.build.__module__)):
        model = randomise(case.build()).double().eval()
        inputs = tuple(i.double() if i.is_floating_point() else i for i in case.inputs())
        config = MethodConfig(multiple=1, batch_norm_scaling=True)
        told.append(entry(case, smcp_fx.prepare(model, inputs, config=config, check=False)))
    RECORD.write_text("".join(f"{json.dumps(one)}\n" for one in told), encoding="utf-8")
    PAGE.write_text(page(told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in KINDS:
        __import__(each)
    sys.exit(main())
