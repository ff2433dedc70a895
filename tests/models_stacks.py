"""Small networks with stacks of matrices that are one parameter: grouped linears, experts, heads, spectral layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import Net, awkward, between, free_parameter
from torch import Tensor, nn

TOKENS = (2, 5, 6)


@awkward(1.0, (2, 6))
def linears_in_groups() -> nn.Module:
    """One channel of every group goes, as in a grouped convolution."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        groups = s.stem(x).view(x.shape[0], 2, 8).transpose(0, 1)
        made = torch.baddbmm(s.bias, torch.relu(torch.bmm(groups, s.weight)), s.other.mT)
        return s.out(made.transpose(0, 1).reshape(x.shape[0], -1))  # type: ignore[no-any-return]

    stacks = {"weight": free_parameter(2, 8, 6), "other": free_parameter(2, 5, 6)}
    return Net(wiring, stem=nn.Linear(6, 16), bias=free_parameter(2, 1, 5), out=nn.Linear(10, 4), **stacks)


@awkward(1.0, (2, 6))
def stack_read_from_both_sides() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        groups = s.stem(x).view(x.shape[0], 2, 8).transpose(0, 1)
        made = torch.relu(groups @ s.weight) @ s.weight.mT
        return s.out(made.transpose(0, 1).flatten(1))  # type: ignore[no-any-return]

    return Net(wiring, stem=nn.Linear(6, 16), weight=free_parameter(2, 8, 6), out=nn.Linear(16, 4))


@awkward(1.0, TOKENS)
def heads_from_one_parameter() -> nn.Module:
    """Queries, keys and values of all heads, and what joins these: whole heads go."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bnd,thde->tbhne", s.stem(x), s.qkv)
        scores = torch.einsum("bhie,bhje->bhij", q, k).softmax(-1)
        heads = torch.einsum("bhij,bhje->bhie", scores, v)
        return s.out(torch.einsum("bhne,hed->bnd", heads, s.join))  # type: ignore[no-any-return]

    stacks = {"qkv": free_parameter(3, 4, 8, 2), "join": free_parameter(4, 2, 10)}
    return Net(wiring, stem=nn.Linear(6, 8), out=nn.Linear(10, 4), **stacks)


@awkward(1.0, TOKENS)
def heads_with_matrices_of_their_own() -> nn.Module:
    """By `matmul`, which adds the dimension of the heads; then a matrix a head, which goes with it."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x).unsqueeze(1)
        q, k, v = h @ s.queries, h @ s.keys, h @ s.values
        heads = F.scaled_dot_product_attention(q, k, v) @ s.own
        return s.out(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    stacks = {name: free_parameter(4, 8, 3) for name in ("queries", "keys", "values")}
    return Net(wiring, stem=nn.Linear(6, 8), own=free_parameter(4, 3, 2), out=nn.Linear(8, 4), **stacks)


@awkward(1.0, TOKENS)
def experts() -> nn.Module:
    """All of them run, and a gate says how much each counts."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        inner = F.gelu(torch.einsum("bnd,edh->benh", h, s.first) + s.shift)
        each = torch.einsum("benh,ehd->bend", inner, s.second)
        return s.out((each * s.gate(h).softmax(-1).mT.unsqueeze(-1)).sum(1))  # type: ignore[no-any-return]

    stacks = {"first": free_parameter(3, 8, 12), "shift": free_parameter(3, 1, 12)}
    parts = {"second": free_parameter(3, 12, 10), "gate": nn.Linear(8, 3), "out": nn.Linear(10, 4)}
    return Net(wiring, stem=nn.Linear(6, 8), **stacks, **parts)


@awkward(1.0)
def spectral_layer() -> nn.Module:
    """A Fourier neural operator's: low frequencies times complex weights, one matrix a frequency; others are zero."""
    return spectral(free_parameter(8, 6, 3, 3, 2), torch.view_as_complex)


def spectral(weight: nn.Parameter, as_complex: Callable[[Tensor], Tensor] = lambda t: t) -> nn.Module:
    def wiring(s: Any, h: Tensor) -> Tensor:
        b, _, height, width = h.shape
        spectrum = torch.fft.rfft2(h)
        made = torch.zeros(b, 6, height, width // 2 + 1, dtype=spectrum.dtype)
        for rows in (slice(None, 3), slice(-3, None)):
            low = spectrum[:, :, rows, :3]
            made[:, :, rows, :3] = torch.einsum("bixy,ioxy->boxy", low, as_complex(s.weight))
        return torch.fft.irfft2(made, s=(height, width))

    return between(wiring, 8, 6, weight=weight)


@awkward(1.0, (2, 3, 8, 7))
def channels_beside_a_stack() -> nn.Module:
    """A graph convolution: its matrices mix the joints of a skeleton; the channels pass."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        parts = h.reshape(h.shape[0], 3, -1, *h.shape[2:])
        return torch.einsum("nkctv,kvw->nctw", parts, s.joints)

    return between(wiring, 12, 4, joints=free_parameter(3, 7, 7))


@awkward(1.0, TOKENS)
def bilinear_layers() -> nn.Module:
    """Of two tensors, and of one tensor twice."""

    def wiring(s: Any, x: Tensor) -> Tensor:
        pair = s.pair(torch.relu(s.one(x)), torch.tanh(s.two(x)))
        return s.out(torch.relu(s.twice(pair, pair)))  # type: ignore[no-any-return]

    layers = {"pair": nn.Bilinear(7, 5, 6), "twice": nn.Bilinear(6, 6, 8, bias=False)}
    return Net(wiring, one=nn.Linear(6, 7), two=nn.Linear(6, 5), out=nn.Linear(8, 4), **layers)
