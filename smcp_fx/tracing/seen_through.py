"""Functions that libraries wrap as leaves of fx graphs, but that are traced here.

`torch.fx.wrap` keeps a function whole where fx alone would fail on it. The functions named here can be traced: they
become ordinary operations, whose channels are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.fx import _symbolic_trace

_SWIN = "torchvision.models.swin_transformer"
_SWIN_3D = "torchvision.models.video.swin_transformer"
_MVIT = "torchvision.models.video.mvit"
_FUNCTIONS = {
    (_SWIN, "_patch_merging_pad"),
    (_SWIN, "_get_relative_position_bias"),
    (_SWIN, "shifted_window_attention"),
    (_SWIN_3D, "_get_window_and_shift_size"),
    (_SWIN_3D, "_get_relative_position_bias"),
    (_SWIN_3D, "_compute_pad_size_3d"),
    (_SWIN_3D, "_compute_attention_mask_3d"),
    (_SWIN_3D, "shifted_window_attention_3d"),
    (_MVIT, "_add_rel_pos"),
    (_MVIT, "_add_shortcut"),
    (_MVIT, "_squeeze"),
    (_MVIT, "_unsqueeze"),
}


@contextlib.contextmanager
def seen_through() -> Iterator[None]:
    """While it is entered, these functions are traced."""
    wrapped = _symbolic_trace._wrapped_fns_to_patch
    taken = {
        key: wrapped.pop(key) for key in list(wrapped) if (wrapped[key].get("__name__"), key[1]) in _FUNCTIONS
    }
    try:
        yield
    finally:
        wrapped.update(taken)
