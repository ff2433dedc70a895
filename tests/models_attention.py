"""Small networks with attention modules of torch, and with attention among channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, conv, free_parameter
from torch import Tensor, nn

TOKENS = (2, 5, 6)


# ---- attention modules of torch ---------------------------------------------------------------------------------


@awkward(1.0, TOKENS)
def multihead_attention() -> nn.Module:
    """Heads go as a whole; what attention reads and writes goes with the stream."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        h = h + s.attend(h, h, h, need_weights=False)[0]
        return s.out(h + s.again(query=h, key=h, value=h)[0])  # type: ignore[no-any-return]

    return Net(
        wiring,
        stem=nn.Linear(6, 8),
        attend=nn.MultiheadAttention(8, 4, 0.1, batch_first=True),
        again=nn.MultiheadAttention(8, 2, bias=False),
        out=nn.Linear(8, 4),
    )


@awkward(1.0, TOKENS)
def encoder_of_torch() -> nn.Module:
    """Under a mask of the input's length, and one of the tokens."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return s.out(s.encoder(s.stem(x), causal, torch.zeros_like(x[:, :, 0])))  # type: ignore[no-any-return]

    layer = nn.TransformerEncoderLayer(8, 4, 12, 0.1, norm_first=True, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    return Net(wiring, stem=nn.Linear(6, 8), encoder=encoder, out=nn.Linear(8, 4))


@awkward(1.0, TOKENS)
def cross_attention() -> nn.Module:
    """One matrix for three inputs: a part of it reads each."""
    return Net(
        lambda s, x: s.out(s.attend(s.one(x), s.two(x), s.two(x))[0]),
        one=nn.Linear(6, 8),
        two=nn.Linear(6, 8),
        attend=nn.MultiheadAttention(8, 4, batch_first=True),
        out=nn.Linear(8, 4),
    )


@awkward(1.0, TOKENS)
def attention_of_other_widths() -> nn.Module:
    """Keys and values of another width have weights of their own."""
    return Net(
        lambda s, x: s.out(s.attend(s.one(x), s.two(x), value=s.two(2 * x), need_weights=False)[0]),
        one=nn.Linear(6, 8),
        two=nn.Linear(6, 10),
        attend=nn.MultiheadAttention(8, 4, kdim=10, vdim=10, batch_first=True),
        out=nn.Linear(8, 4),
    )


@awkward(1.0, TOKENS)
def attention_under_masks() -> nn.Module:
    """Of booleans and of numbers, for all images and heads and for each."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        h = h + s.attend(h, h, h, attn_mask=later, need_weights=False)[0]
        h = h + s.attend(h, h, h, attn_mask=s.scores)[0]
        short = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        short = torch.cat([short, short])[: len(h)] if len(h) < 4 else None
        h = h + s.attend(h, s.other(h), h, key_padding_mask=short)[0]
        return s.out(h)  # type: ignore[no-any-return]

    parts = {"stem": nn.Linear(6, 8), "other": nn.Linear(8, 8), "out": nn.Linear(8, 4)}
    attend = nn.MultiheadAttention(8, 4, batch_first=True)
    return Net(wiring, attend=attend, scores=free_parameter(5, 5), **parts)


@awkward(1.0, TOKENS)
def decoder_of_torch() -> nn.Module:
    """Cross-attention, and a causal mask that is told to be one."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        return s.out(s.decoder(s.stem(x), s.memory(x), tgt_mask=causal, tgt_is_causal=True))  # type: ignore[no-any-return]

    layer = nn.TransformerDecoderLayer(8, 4, 12, 0.1, batch_first=True)
    parts = {"stem": nn.Linear(6, 8), "memory": nn.Linear(6, 8), "out": nn.Linear(8, 4)}
    return Net(wiring, decoder=nn.TransformerDecoder(layer, 2), **parts)


@awkward(1.0, TOKENS)
def transformer_of_torch() -> nn.Module:
    return Net(
        lambda s, x: s.out(s.both(s.stem(x), s.memory(x))),
        stem=nn.Linear(6, 8),
        memory=nn.Linear(6, 8),
        both=nn.Transformer(8, 2, 1, 1, 12, batch_first=True),
        out=nn.Linear(8, 4),
    )


# ---- attention among channels ---------------------------------------------------------------------------------


@awkward(1.0)
def channels_attend_to_channels() -> nn.Module:
    """As in DANet: of one map, the energies taken from their maximum, the result on a shortcut."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        x = h.view(h.shape[0], h.shape[1], -1)
        energy = torch.bmm(x, x.permute(0, 2, 1))
        energy = torch.max(energy, -1, keepdim=True)[0].expand_as(energy) - energy
        out = torch.bmm(energy.softmax(-1), x).view(*h.shape)
        return s.gamma * out + h

    return between(wiring, gamma=nn.Parameter(torch.tensor([0.7])))


@awkward(1.0)
def channels_attend_to_those_of_other_layers() -> nn.Module:
    """As in Restormer with one head: normed queries and keys, a temperature, values of their own."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        _, _, tall, wide = h.shape
        q, k, v = (part.flatten(2) for part in s.qkv(h).chunk(3, 1))
        weights = F.softmax(
            F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * s.heat, dim=-1
        )
        return (F.dropout(weights, 0.1, s.training) @ v).unflatten(2, (tall, wide))

    return between(wiring, 8, 6, qkv=conv(8, 18, 1), heat=nn.Parameter(torch.tensor([1.3])))


@awkward(1.0, TOKENS)
def channels_attend_with_channels_last() -> nn.Module:
    """Tokens by channels: the matrix stands on the right, transposed, its columns the rows of the energies."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        energy = torch.einsum("bni,bnj->bij", h, s.key(h)) / 3
        energy = energy - energy.mean(2, keepdim=True)
        out = h @ energy.softmax(2).mT + torch.einsum("bni,bij->bnj", h, energy.tanh())
        return s.out(out)  # type: ignore[no-any-return]

    parts = {"stem": nn.Linear(6, 8), "key": nn.Linear(8, 8), "out": nn.Linear(8, 4)}
    return Net(wiring, **parts)


@awkward(1.0)
def channels_attend_to_fewer() -> nn.Module:
    """As many rows as channels, fewer columns: each side goes by itself."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        k = s.few(h)
        weights = (h.flatten(2) @ k.flatten(2).mT).softmax(-1)
        return h + (weights @ k.flatten(2)).view_as(h) + s.back(k)

    return between(wiring, few=conv(8, 5), back=conv(5, 8))


@awkward(0.0)
def energies_among_channels_that_a_linear_reads() -> nn.Module:
    """Columns that something else reads stay, and so do all channels of what gives rows and columns."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        x = h.flatten(2)
        return h * s.line((x @ x.mT).flatten(1))[:, :, None, None].sigmoid()

    return between(wiring, line=nn.Linear(64, 8))


@awkward(1.0)
def energies_among_channels_beside_a_table() -> nn.Module:
    """A number for each pair of channels, whose rows and columns go, and a size that is asked."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        x = h.flatten(2)
        energy = x @ x.mT
        return h + (((energy + s.table) / energy.shape[-1]) @ x).view_as(h)

    return between(wiring, table=free_parameter(8, 8))
