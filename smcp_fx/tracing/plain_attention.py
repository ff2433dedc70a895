"""Self-attention of `nn.MultiheadAttention` in plain operations, so that its heads and what it reads have channels.

before   attention(x, x, x)         after   linear, split into heads, scaled_dot_product_attention, linear
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_NAMES = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")


def is_plain(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is this a call of self-attention, or of torch's encoders around it, without masks?"""
    if type(module) in (nn.TransformerEncoder, nn.TransformerEncoderLayer):
        return not any(one is not None and one is not False for one in (*args[1:], *kwargs.values()))
    if type(module) is not nn.MultiheadAttention or module.add_zero_attn or module.bias_k is not None:
        return False
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    masked = any(given.get(name) is not None for name in ("key_padding_mask", "attn_mask"))
    alike = given.get("query") is given.get("key") is given.get("value")
    return alike and not masked and not given.get("is_causal") and bool(module._qkv_same_embed_dim)


def forward_of(module: Any, forward: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """What to trace in the place of its forward; ``rank``: the dimensions of what it is given."""
    return functools.partial(attend, module, rank) if type(module) is nn.MultiheadAttention else forward


def attend(module: nn.MultiheadAttention, rank: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What the module's forward returns for such a call."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    x = given["query"] if rank == 3 else given["query"].unsqueeze(1)
    if module.batch_first and rank == 3:
        x = x.transpose(0, 1)
    # [tokens, images, 3 * channels] to [images, heads, tokens, channels of a head], three times
    together = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    parts = torch.unflatten(together, -1, (3, module.num_heads, module.head_dim))
    query, key, value = (part.permute(1, 2, 0, 3) for part in parts.unbind(2))
    dropout = module.dropout if module.training else 0.0
    weights = None
    if given.get("need_weights", True):
        scores = (query * math.sqrt(1.0 / module.head_dim)) @ key.transpose(-2, -1)
        weights = F.dropout(F.softmax(scores, -1), dropout) if dropout else F.softmax(scores, -1)
        found = weights @ value
        if given.get("average_attn_weights", True):
            weights = weights.mean(1)
        if rank == 2:
            weights = weights.squeeze(0)
    else:
        found = F.scaled_dot_product_attention(query, key, value, None, dropout)
    out = F.linear(found.permute(2, 0, 1, 3).flatten(2), module.out_proj.weight, module.out_proj.bias)
    if rank == 2:
        return out.squeeze(1), weights
    return (out.transpose(0, 1) if module.batch_first else out), weights


@contextlib.contextmanager
def slow_path() -> Iterator[None]:
    """Transformer layers call their parts while it is entered, instead of one function for all of them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
