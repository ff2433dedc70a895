"""Small networks with learned keys, queries, positions and shares of branches: parameters that belong to no layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn

TOKENS = (2, 5, 6)


@awkward(1.0, TOKENS)
def memory_that_is_both_keys_and_values() -> nn.Module:
    """As in external attention and Hopfield layers, spread over the images."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.one(x)
        memory = s.memory.expand(h.shape[0], -1, -1)
        return s.out(h + torch.bmm(torch.bmm(h, memory.mT).softmax(-1), memory))  # type: ignore[no-any-return]

    return Net(wiring, one=nn.Linear(6, 8), out=nn.Linear(8, 4), memory=free_parameter(3, 8))


@awkward(1.0, TOKENS)
def attention_to_a_memory() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        h, count = s.one(x), x.shape[0]
        keys, values = s.keys_of[None].repeat(count, 1, 1), s.values_of[None].expand(count, -1, -1)
        return s.out(h + F.scaled_dot_product_attention(h, keys, values))  # type: ignore[no-any-return]

    learned = {"keys_of": free_parameter(3, 8), "values_of": free_parameter(3, 8)}
    return Net(wiring, one=nn.Linear(6, 8), out=nn.Linear(8, 4), **learned)


def _heads(s: Any, h: Tensor, positions: Tensor) -> Tensor:
    """Two heads whose scores also tell how each query meets each position [1, heads, positions, channels]."""
    q, k, v = (layer(h).view(h.shape[0], 2, 4, -1) for layer in (s.q, s.k, s.v))
    scores = (q.mT @ k + positions @ q).softmax(-1)
    return (v @ scores.mT).view(h.shape)


@awkward(1.0)
def positions_of_each_head() -> nn.Module:
    layers = {name: conv(8, 8, 1) for name in "qkv"}
    return between(lambda s, h: _heads(s, h, s.table.mT), table=free_parameter(1, 2, 4, 64), **layers)


@awkward(1.0)
def positions_of_rows_and_columns() -> nn.Module:
    """As bottleneck transformers sum them."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        return _heads(s, h, (s.rows + s.columns).view(1, 2, 4, -1).permute(0, 1, 3, 2))

    tables = {"rows": free_parameter(1, 2, 4, 8, 1), "columns": free_parameter(1, 2, 4, 1, 8)}
    return between(wiring, **tables, **{name: conv(8, 8) for name in "qkv"})


@awkward(1.0)
def positions_as_large_as_the_map() -> nn.Module:
    """Half of the channels tell rows, half columns, as in DETR; the tables are cut to the map's size."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        rows, columns = h.shape[-2:]
        across = s.columns[:columns].unsqueeze(0).repeat(rows, 1, 1)
        along = s.rows[:rows].unsqueeze(1).repeat(1, columns, 1)
        positions = torch.cat([across, along], -1).flatten(0, 1)
        y = h.flatten(2).mT + positions
        return s.attention(y, y, y)[0].mT.reshape(h.shape)  # type: ignore[no-any-return]

    tables = {"rows": free_parameter(20, 4), "columns": free_parameter(20, 4)}
    return between(wiring, attention=nn.MultiheadAttention(8, 2, batch_first=True), **tables)


@awkward(1.0)
def shares_of_branches_by_softmax() -> nn.Module:
    """For each channel, over the branches."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        shares, others = s.shares.softmax(0), F.softmax(s.others, dim=-1)
        y = shares[0] * s.one(h) + shares[1] * s.two(h)
        return (torch.stack([y, h], -1) * others[:, None, None]).sum(-1)

    learned = {"shares": free_parameter(2, 8, 1, 1), "others": free_parameter(8, 2)}
    return between(wiring, one=conv(8, 8), two=conv(8, 8), **learned)


@awkward(1.0)
def shares_of_branches_by_their_sum() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        weights = torch.relu(s.shares)
        shares = weights / (weights.sum(0, keepdim=True) + 1e-4)
        return shares[0].view(-1, 1, 1) * s.one(h) + shares[1].view(-1, 1, 1) * h

    return between(wiring, one=conv(8, 8), shares=free_parameter(2, 8))


@awkward(1.0)
def pooling_by_attention() -> nn.Module:
    """As CLIP's residual networks pool: torch's function of attention, with the weights of linears."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x).flatten(2).permute(2, 0, 1)
        h = torch.cat([h.mean(0, keepdim=True), h]) + s.positions[:, None, :]
        pooled, _ = F.multi_head_attention_forward(
            query=h[:1],
            key=h,
            value=h,
            embed_dim_to_check=h.shape[-1],
            num_heads=2,
            q_proj_weight=s.q.weight,
            k_proj_weight=s.k.weight,
            v_proj_weight=s.v.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat([s.q.bias, s.k.bias, s.v.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=s.out.weight,
            out_proj_bias=s.out.bias,
            use_separate_proj_weight=True,
            training=s.training,
            need_weights=False,
        )
        return pooled.squeeze(0)

    layers = {name: nn.Linear(8, 8) for name in "qkv"}
    return Net(wiring, stem=conv(3, 8), **layers, out=nn.Linear(8, 4), positions=free_parameter(65, 8))
