"""Whether the network that comes out can be saved: asked before it is trained."""

from __future__ import annotations

from torch import nn

from smcp_fx.errors import CheckpointError
from smcp_fx.serialization.saving import check_savable

#: The file of the weights, beside the ONNX files.
WEIGHTS = "pruned.safetensors"


def why_unsavable(converted: nn.Module) -> str:
    """Return why `smcp_fx.save` refuses a model; nothing where it does not.

    Which units go changes no class, function or attribute: a model converted at full size tells.
    """
    try:
        check_savable(converted)
    except CheckpointError as error:
        return str(error)
    return ""
