"""Write docs/reference/free_channels.md: what is free and what is not, by kind, from the networks of `AWKWARD`.

    python tests/free_channels_page.py

`tests/channels/test_channels.py` holds every line of the page against the network that it tells of.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import torch
from models import AWKWARD, Case, randomise

import smcp_fx
from smcp_fx.channels.graph import ChannelGraph
from smcp_fx.channels.trail import INPUT

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "free_channels.md"
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

Written by `python tests/free_channels_page.py` from the networks that the tests prune: two convolutions
or so, and between them what the line says. The tests hold every line against the channel graph, and every network
masked against sliced.

*Free*: share of the dense layers' input channels, the network's inputs left out.
[What to do about the rest](../guides/what_cannot_be_pruned.md); [whole models](../results/models.md).
"""


def line(case: Case, channels: ChannelGraph) -> str:
    """What the page says of a network: its name, and what stays of its channels and why."""
    name = case.name.replace("_", " ").replace(" s ", "'s ")
    if channels.free_share == 1:
        return f"{name};"
    return f"| {name} | {channels.free_share:.2f} | {_reason(channels)} |"


def lines() -> set[str]:
    """The lines of the page that tell of networks."""
    found = PAGE.read_text().splitlines()
    return {each for each in found if each.endswith(";") or re.match(r"\| .* \| \d\.\d\d \|", each)}


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
    """Trace every network, and write the page."""
    told: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for case in AWKWARD:
        model = randomise(case.build()).double().eval()
        inputs = tuple(i.double() if i.is_floating_point() else i for i in case.inputs())
        prepared = smcp_fx.prepare(model, inputs, config=smcp_fx.PruningConfig(multiple=1), check=False)
        told[case.build.__module__].append(line(case, prepared.channels))
    text = _HEAD
    for kind, title in KINDS.items():
        free = [each for each in told[kind] if each.endswith(";")]
        rest = [each for each in told[kind] if not each.endswith(";")]
        text += f"\n## {title}\n\nAll channels are free in:\n" + "\n".join(free) + "\n"
        if rest:
            text += "\n| network | free | most of what stays |\n|---|---|---|\n" + "\n".join(rest) + "\n"
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in KINDS:
        __import__(each)
    sys.exit(main())
