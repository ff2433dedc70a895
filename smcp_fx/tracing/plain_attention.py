"""`nn.MultiheadAttention`, and its function, as plain operations, so that heads and inputs have channels.

before   attention(x, y, y, mask)   after   three linears, split into heads, scaled_dot_product_attention, linear
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_NAMES = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
#: Torch's layers around attention: masks that each may compare with a causal one, and the argument that avoids it.
_LAYERS: dict[type[nn.Module], tuple[tuple[str, str], ...]] = {
    nn.TransformerEncoderLayer: (),
    nn.TransformerDecoderLayer: (),
    nn.TransformerEncoder: (("mask", "is_causal"),),
    nn.TransformerDecoder: (("tgt_mask", "tgt_is_causal"),),
    nn.Transformer: (("src_mask", "src_is_causal"), ("tgt_mask", "tgt_is_causal")),
}


def is_plain_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is this a call of attention, or of torch's layers around it?"""
    if type(module) in _LAYERS:
        return True
    return type(module) is nn.MultiheadAttention and not module.add_zero_attn and module.bias_k is None


def forward_of(
    module: Any, forward: Callable[..., Any], value: Callable[[Any], torch.Tensor]
) -> Callable[..., Any]:
    """The function to trace in place of the module's forward; ``value``: a traced tensor's value on the example."""
    if type(module) is nn.MultiheadAttention:
        return functools.partial(attend, module, value)

    def unmasked(*args: Any, **kwargs: Any) -> Any:
        """The forward, without the comparison of a mask with a causal one: the mask is added in any case."""
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        for name, hint in _LAYERS[type(module)]:
            if isinstance(bound.arguments.get(name), torch.fx.Proxy) and bound.arguments.get(hint) is None:
                bound.arguments[hint] = False
        return forward(*bound.args[1:], **bound.kwargs)

    return unmasked


def attend(
    module: Any, value: Callable[[Any], torch.Tensor], /, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """The result of the module's forward, computed by plain operations."""
    arguments = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    rank = value(arguments["query"]).dim()
    sources = [arguments[name] for name in _NAMES[:3]]
    if rank == 2:
        sources = _alike(lambda x: x.unsqueeze(1), sources)
    elif module.batch_first:
        sources = _alike(lambda x: x.transpose(0, 1), sources)
    query, key, values = _projected(module, sources)
    masks = _masks(module, arguments, value, query)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if arguments.get("need_weights", True):
        scores = (query * math.sqrt(1.0 / module.head_dim)) @ key.transpose(-2, -1)
        for mask in masks:
            scores = scores + mask
        weights = F.dropout(F.softmax(scores, -1), dropout) if dropout else F.softmax(scores, -1)
        heads_out = weights @ values
        if arguments.get("average_attn_weights", True):
            weights = weights.mean(1)
        if rank == 2:
            weights = weights.squeeze(0)
    else:
        heads_out = F.scaled_dot_product_attention(query, key, values, sum(masks) if masks else None, dropout)
    out = F.linear(heads_out.permute(2, 0, 1, 3).flatten(2), module.out_proj.weight, module.out_proj.bias)
    if rank == 2:
        return out.squeeze(1), weights
    return (out.transpose(0, 1) if module.batch_first else out), weights


def attend_by_function(
    value: Callable[[Any], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """The result of `F.multi_head_attention_forward` (as in CLIP's pooling); None for a call that adds keys."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    if arguments["add_zero_attn"] or any(
        arguments[n] is not None for n in ("bias_k", "bias_v", "static_k", "static_v")
    ):
        return None
    width, heads = value(arguments["query"]).shape[-1], arguments["num_heads"]
    names = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "training")
    module = SimpleNamespace(
        **{name: arguments[name] for name in names},
        embed_dim=width,
        num_heads=heads,
        head_dim=width // heads,
        dropout=arguments["dropout_p"],
        batch_first=False,
        out_proj=SimpleNamespace(weight=arguments["out_proj_weight"], bias=arguments["out_proj_bias"]),
    )
    if arguments["use_separate_proj_weight"]:
        module.in_proj_weight = None
    return attend(module, value, **{name: arguments[name] for name in (*_NAMES, "average_attn_weights")})


def _alike(move: Callable[[Any], Any], sources: list[Any]) -> list[Any]:
    """Move each source; a tensor that occurs several times is moved once, and stays one object."""
    moved: dict[int, Any] = {}
    for source in sources:
        if id(source) not in moved:
            moved[id(source)] = move(source)
    return [moved[id(source)] for source in sources]


def _projected(module: Any, sources: list[Any]) -> list[Any]:
    """[tokens, images, channels] to [images, heads, tokens, channels of a head], three times."""
    packed, bias = module.in_proj_weight, module.in_proj_bias
    if packed is not None and sources[0] is sources[1] is sources[2]:
        together = F.linear(sources[0], packed, bias)
        parts = torch.unflatten(together, -1, (3, module.num_heads, module.head_dim))
        return [part.permute(1, 2, 0, 3) for part in parts.unbind(2)]
    width = module.embed_dim
    edges = [slice(width * i, width * (i + 1)) for i in range(3)]
    own = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    made = []
    for source, edge, weight in zip(sources, edges, own, strict=True):
        part = packed[edge] if packed is not None else weight
        projected = F.linear(source, part, None if bias is None else bias[edge])
        heads = torch.unflatten(projected, -1, (module.num_heads, module.head_dim))
        made.append(heads.permute(1, 2, 0, 3))
    return made


def _masks(module: Any, named: dict[str, Any], value: Callable[[Any], torch.Tensor], query: Any) -> list[Any]:
    """The masks, as biases to add to the scores [images, heads, queries, keys]."""
    masks = []
    for name in ("attn_mask", "key_padding_mask"):
        mask = named.get(name)
        if mask is None:
            continue
        rank, kind = value(mask).dim(), value(mask).dtype
        if kind is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -math.inf)
        elif kind is not value(query).dtype:
            mask = mask.to(query.dtype)
        if name == "key_padding_mask":
            mask = mask[:, None, None] if rank == 2 else mask
        elif rank == 3:  # one for each image and head
            mask = torch.unflatten(mask, 0, (-1, module.num_heads))
        masks.append(mask)
    return masks


@contextlib.contextmanager
def slow_path() -> Iterator[None]:
    """While it is entered, transformer layers call their parts instead of one fused function.

    They also skip the question whether two masks are of one type.
    """
    before, asked = torch.backends.mha.get_fastpath_enabled(), F._none_or_dtype
    torch.backends.mha.set_fastpath_enabled(False)
    F._none_or_dtype = lambda input: None if isinstance(input, torch.fx.Proxy) else asked(input)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        F._none_or_dtype = asked
