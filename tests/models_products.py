"""Small networks with products of two tensors: attention in its many forms, matmul, einsum, computed weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn

TOKENS = (2, 5, 6)


def heads(x: Tensor, count: int) -> Tensor:
    """[batch, tokens, channels] to [batch, heads, tokens, channels / heads]."""
    return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


@awkward(1.0, TOKENS)
def attention_of_one_head() -> nn.Module:
    """Queries and keys go together; no layer reads them. The width that they had scales them."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.q(x), s.k(x), s.v(x)
        return s.out(torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, -1) @ v)  # type: ignore[no-any-return]

    return Net(wiring, q=nn.Linear(6, 8), k=nn.Linear(6, 8), v=nn.Linear(6, 10), out=nn.Linear(10, 4))


@awkward(1.0, TOKENS)
def attention_of_torch_with_one_head() -> nn.Module:
    """Scaled by the width of the queries unless it is told otherwise."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x), 1) for layer in (s.q, s.k, s.v))
        y = F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(k, q, v, scale=0.5)
        return s.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return Net(wiring, q=nn.Linear(6, 8), k=nn.Linear(6, 8), v=nn.Linear(6, 10), out=nn.Linear(10, 4))


@awkward(1.0, TOKENS)
def attention_of_heads_from_one_linear() -> nn.Module:
    """Whole heads go: their queries, keys and values together."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = s.qkv(x).reshape(b, n, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * 0.7) @ k.transpose(-2, -1)
        return s.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, 8))  # type: ignore[no-any-return]

    return Net(wiring, qkv=nn.Linear(6, 24), out=nn.Linear(8, 4))


@awkward(1.0, TOKENS)
def attention_of_torch() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x), 4) for layer in (s.q, s.k, s.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return s.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return Net(wiring, q=nn.Linear(6, 8), k=nn.Linear(6, 8), v=nn.Linear(6, 8), out=nn.Linear(8, 4))


class RelativeBias(nn.Module):
    """Attention with a bias a head, looked up in a table by an index the module holds."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(*sizes) for sizes in ((6, 8), (6, 8), (6, 8), (8, 4)))
        self.table = free_parameter(9, 4)
        place = torch.arange(5)
        self.register_buffer("index", place[:, None] - place[None, :] + 4, persistent=False)
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        """[2, 5, 4]."""
        q, k, v = (heads(layer(x), 4) for layer in (self.q, self.k, self.v))
        index = self.index[:5, :5]
        if self.outside:
            index = torch.as_tensor(index).clone().to(x.device).long()
        bias = self.table[index.flatten()].view(5, 5, -1).permute(2, 0, 1).unsqueeze(0)
        if self.outside:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            y = (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v
        return self.out(torch.as_tensor(y).transpose(1, 2).reshape(x.shape[0], 5, -1))  # type: ignore[no-any-return]


@awkward(1.0, TOKENS)
def attention_with_a_bias_from_a_table() -> nn.Module:
    return RelativeBias(False)


@awkward(1.0, TOKENS)
def attention_of_torch_with_a_bias_from_a_table() -> nn.Module:
    return RelativeBias(True)


@awkward(1.0, (2, 3, 5, 5))
def attention_of_one_head_with_biases_of_positions() -> nn.Module:
    """A bias for each pair of positions, of which there are more than channels: positions are no channels."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        x = s.stem(x)
        q, k, v = (layer(x).flatten(2) for layer in (s.q, s.k, s.v))
        scores = q.transpose(1, 2) @ k + s.table[:, s.places][0]
        y = v @ scores.softmax(-1).transpose(1, 2)
        return s.out(y.view(x.shape[0], -1, 5, 5))  # type: ignore[no-any-return]

    layers = {name: nn.Conv2d(6, 8, 1) for name in "qkv"}
    net = Net(wiring, stem=nn.Conv2d(3, 6, 1), **layers, out=nn.Conv2d(8, 4, 1), table=free_parameter(1, 25))
    net.register_buffer("places", (torch.arange(25)[:, None] - torch.arange(25)[None, :]).abs())
    return net


@awkward(1.0, TOKENS)
def attention_with_positions_by_computed_places() -> nn.Module:
    """One head, whose channels also meet those of the relative positions."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        q, k, v = s.q(x), s.k(x), s.v(x)
        positions = s.table[(place[:, None] - place[None, :] + 4.0).long()]
        scores = q @ k.transpose(-2, -1) + torch.einsum("bqc,qkc->bqk", q, positions)
        return s.out(scores.softmax(-1) @ v)  # type: ignore[no-any-return]

    layers = {name: nn.Linear(6, 8) for name in "qkv"}
    return Net(wiring, **layers, out=nn.Linear(8, 4), table=free_parameter(9, 8))


@awkward(1.0, TOKENS)
def attention_with_normalised_queries() -> nn.Module:
    """A layer norm inside each head: heads go whole, so that it sees all it saw."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        q, k, v = heads(s.q(x), 2), heads(s.k(x), 2), heads(s.v(x), 2)
        y = F.scaled_dot_product_attention(s.norm(q), s.norm(k), v)
        return s.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    parts = {name: nn.Linear(6, 8) for name in "qkv"}
    return Net(wiring, norm=nn.LayerNorm(4), out=nn.Linear(8, 4), **parts)


@awkward(1.0)
def attention_over_channels() -> nn.Module:
    """Channels attend to channels, which another layer scores."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        flat = h.flatten(2)
        return s.mid(h) + (torch.softmax(s.k(h).flatten(2) @ flat.transpose(1, 2), -1) @ flat).view(h.shape)  # type: ignore[no-any-return]

    net = between(wiring, 8, mid=conv(8, 8), k=conv(8, 8))
    net.out = nn.Sequential(conv(8, 6), nn.ReLU(), conv(6, 4))
    return net


@awkward(1.0)
def matmul_with_a_parameter() -> nn.Module:
    return between(
        lambda s, h: (h.permute(0, 2, 3, 1) @ s.mix).permute(0, 3, 1, 2), 8, 6, mix=free_parameter(8, 6)
    )


@awkward(1.0)
def kernels_of_each_position() -> nn.Module:
    """As in KBNet: mixed from tables [1, kernels, ...] by weights that the input gives, for groups of channels."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        b, c, rows, columns = h.shape
        weights = s.weights(h).flatten(2).mT
        patches = F.unfold(h, 3, padding=1).reshape(b, 4, c // 4 * 9, rows * columns).permute(0, 3, 1, 2)
        kernels = (weights @ s.kernels).reshape(b, rows * columns, 4, c // 4, c // 4 * 9)
        y = (kernels @ patches.unsqueeze(-1)).reshape(b, rows * columns, c) + weights @ s.shifts
        return y.mT.reshape(b, c, rows, columns) + h

    tables = {"kernels": free_parameter(1, 5, 8 * 2 * 9), "shifts": free_parameter(1, 5, 8)}
    return between(wiring, weights=nn.Conv2d(8, 5, 1), **tables)


@awkward(1.0)
def matmul_over_space() -> nn.Module:
    """Global context: weights over the positions, channels free."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        weights = s.where(h).flatten(2).softmax(-1).unsqueeze(-1)  # [2, 1, 64, 1]
        context = torch.matmul(h.flatten(2).unsqueeze(1), weights)  # [2, 1, 8, 1]
        return h + context.view(h.shape[0], -1, 1, 1)

    return between(wiring, where=nn.Conv2d(8, 1, 1))


@awkward(1.0)
def einsum_of_one() -> nn.Module:
    """It moves dimensions, and sums over others."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = s.mid(torch.einsum("nchw->nhwc", h)).movedim(-1, 1)
        return h + torch.einsum("nchw->nc", h)[..., None, None]  # type: ignore[no-any-return]

    return between(wiring, mid=nn.Linear(8, 8))


@awkward(1.0)
def einsum_over_space() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        scores = torch.einsum("bchw,bdhw->bd", s.where(h), h)
        return h * torch.sigmoid(scores)[:, :, None, None]

    return between(wiring, where=nn.Conv2d(8, 1, 1))


@awkward(0.0)
def einsum_over_channels() -> nn.Module:
    """No mask stands on what an einsum of two activations sums over: it stays."""
    return between(lambda s, h: torch.einsum("bchw,bcij->bhw", h, h).unsqueeze(1).expand(-1, 4, -1, -1), 8, 4)


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised each time it runs, as NFNets and BiT have them."""

    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, 3, padding=1, groups=groups)
        self.gain = free_parameter(outputs, 1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """As conv2d."""
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, (self.gain * 0.5).view(-1), training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=1, groups=self.groups)


@awkward(1.0)
def standardised_weights() -> nn.Module:
    return nn.Sequential(Standardised(3, 8), nn.ReLU(), Standardised(8, 8, 2), nn.ReLU(), Standardised(8, 4))


@awkward(1.0)
def standardised_by_hand() -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        mean = s.weight.mean((1, 2, 3), keepdim=True)
        deviation = s.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(h, (s.weight - mean) / (deviation + 1e-5), padding=1)

    return between(wiring, 8, 6, weight=free_parameter(6, 8, 3, 3))


@awkward(1.0)
def weight_computed_from_the_input() -> nn.Module:
    """A parameter times a number of the images."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        weight = torch.sigmoid(h.mean()) * s.weight
        return s.mid(F.conv2d(h, weight, padding=1))  # type: ignore[no-any-return]

    return between(wiring, 8, 8, weight=free_parameter(6, 8, 3, 3), mid=conv(6, 8))


@awkward(1.0)
def weight_used_as_it_is_and_computed_from() -> nn.Module:
    """A weight that a module reads as well cannot hold what is computed from it, which gets a name of its own."""
    return between(lambda s, h: s.mid(h) + F.conv2d(h, s.mid.weight.flip(2), padding=1), mid=conv(8, 8))


@awkward(1.0)
def products_by_other_names() -> nn.Module:
    """`tensordot`, `addmm` with a matrix of parameters, `baddbmm` of two tensors."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h = torch.tensordot(h, s.mix, dims=([1], [0])).permute(0, 3, 1, 2)
        gate = torch.addmm(s.shift, h.mean((2, 3)), s.gate)
        keys, tokens = s.keys(h).flatten(2), h.flatten(2)
        same = torch.baddbmm(h.new_zeros(1, 64, 64), tokens.mT, keys, alpha=0.1)
        return (tokens @ same.softmax(-1)).view(h.shape) * gate[:, :, None, None]

    parts = {"mix": free_parameter(8, 8), "gate": free_parameter(8, 8), "shift": free_parameter(8)}
    return between(wiring, keys=conv(8, 8), **parts)


@awkward(1.0, TOKENS)
def attention_where_the_scores_of_another_allow_it() -> nn.Module:
    """As in Mask2Former: a mask of booleans, repeated for the heads, which lie in the batch."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        places = s.places(x)
        mask = (places @ places.mT).sigmoid().unsqueeze(1).repeat(1, 4, 1, 1)
        mask = (mask.flatten(0, 1) < 0.5).bool()
        open_ = (mask.sum(-1) != mask.shape[-1]).to(mask.dtype)  # none may be shut out of everything
        return s.out(s.attention(x, x, x, attn_mask=mask * open_.unsqueeze(-1))[0])  # type: ignore[no-any-return]

    return Net(
        lambda s, x: wiring(s, s.stem(x)),
        stem=nn.Linear(6, 8),
        places=nn.Linear(8, 5),
        attention=nn.MultiheadAttention(8, 4, batch_first=True),
        out=nn.Linear(8, 4),
    )


@awkward(1.0, TOKENS)
def heads_that_share_keys() -> nn.Module:
    """Two heads of queries a head of keys and values."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        q, k, v = heads(s.q(x), 4), heads(s.k(x), 2), heads(s.v(x), 2)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return s.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return Net(wiring, q=nn.Linear(6, 16), k=nn.Linear(6, 8), v=nn.Linear(6, 8), out=nn.Linear(16, 4))


@awkward(1.0, TOKENS)
def einsum_of_three() -> nn.Module:
    """Linear attention by a kernel: the sums over keys divide each query's result."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 2)) for layer in (s.q, s.k, s.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        weights = torch.einsum("nshd,nshm->nhmd", k, v)
        scale = 1 / torch.einsum("nlhd,nhd->nlh", q, k.sum(1))
        return s.out(torch.einsum("nlhd,nhmd,nlh->nlhm", q, weights, scale).flatten(2))  # type: ignore[no-any-return]

    return Net(wiring, q=nn.Linear(6, 8), k=nn.Linear(6, 8), v=nn.Linear(6, 8), out=nn.Linear(8, 4))
