"""What is opaque costs what PyTorch's own counter sees in it, in the network that comes out, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, conv, random_masks, size_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision.ops import DeformConv2d

import smcp_fx
from smcp_fx.tracing.multiply_adds import MultiplyAdds


def seen(model: nn.Module, *inputs: Any) -> int:
    """Multiply-adds by PyTorch's counter, which knows no fused attention, encoder layers or recurrent layers."""
    settings = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model.eval()(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(settings[0])
        torch._C._set_mkldnn_enabled(settings[1])
    return counter.get_total_flops() // 2


def counted(model: nn.Module, *inputs: Any) -> int:
    with torch.no_grad(), MultiplyAdds() as counter:
        model.eval()(*inputs)
    return counter.total


def attention() -> nn.Module:
    return Net(
        lambda s, x: s.mid(x, x, x, need_weights=False)[0], mid=nn.MultiheadAttention(8, 2, batch_first=True)
    )


OPAQUE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 4, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
    "linear": (lambda: nn.Linear(5, 7), (2, 3, 5)),
    "lstm": (lambda: nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True), (2, 3, 5)),
    "gru": (lambda: nn.GRU(5, 7), (3, 2, 5)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 20, batch_first=True), (2, 5, 8)),
    "encoder, positions first": (lambda: nn.TransformerEncoderLayer(8, 2, 20), (5, 2, 8)),
    "attention": (attention, (2, 5, 8)),
    "products": (lambda: Net(lambda s, x: torch.einsum("bik,bjk->bij", x, x) @ x), (2, 3, 5)),
    "sums of products": (lambda: Net(lambda s, x: torch.addbmm(x[0] @ x[0].mT, x, x.mT)), (2, 3, 5)),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_operations_count_as_pytorch_counts_them(name: str) -> None:
    build, shape = OPAQUE[name]
    if name == "sums of products":
        x = torch.randn(shape)
        assert counted(build(), x) == (1 + 2) * 3 * 3 * 5
        return
    model, x = build(), torch.randn(shape)
    assert counted(model, x) == seen(model, x) > 0


def test_operations_that_pytorch_does_not_count() -> None:
    assert counted(nn.Bilinear(3, 4, 5), torch.randn(2, 3), torch.randn(2, 4)) == 2 * 3 * 4 * 5
    offsets = torch.randn(2, 18, 6, 6)
    assert counted(DeformConv2d(3, 4, 3), torch.randn(2, 3, 8, 8), offsets) == 2 * 6 * 6 * 4 * 3 * 9
    inference = torch.inference_mode()(F.linear)  # where linear layers are one operation
    assert counted(Net(lambda s, x: inference(x, x[0])), torch.randn(2, 3, 5)) == 2 * 3 * 3 * 5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_positions_are_not_computed() -> None:
    """An encoder leaves them out: 3 and 5 positions of 5."""
    layer = nn.TransformerEncoderLayer(8, 2, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    padding = torch.arange(5)[None] >= torch.tensor([[3], [5]])
    whole = Net(lambda s, x: s.mid(x, src_key_padding_mask=padding), mid=model)
    one_by_one = sum(counted(model, torch.randn(1, n, 8)) for n in (3, 5))
    assert counted(whole, torch.randn(2, 5, 8)) == one_by_one


# ---- networks -----------------------------------------------------------------------------------------------


def stem(channels: int) -> nn.Module:
    return nn.Sequential(conv(3, 16, 3), nn.ReLU(), conv(16, channels, 3))


class Opaque(nn.Module):
    """Cannot be traced, and reads its weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().abs().max()) > 1e9 else F.conv2d(x, self.weight, padding=1)


class InParts(nn.Module):
    """A model whose top cannot be traced: two regions, a stage between them that is none, and a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.stage, self.head = (
            stem(8),
            Opaque(),
            nn.Sequential(conv(8, 16, 3), nn.ReLU(), conv(16, 4, 3)),
        )
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.stage(self.body(x)))
        return x.mean((2, 3)) @ self.weight if float(x.detach().sum()) < 1e9 else x


def windows(s: Any, x: Tensor) -> Tensor:
    x = s.stem(x)
    b, c, h, w = x.shape
    x = x.view(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
    x = s.two(F.relu(s.one(x)))
    return s.out(x.view(b, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w))


def heads(s: Any, x: Tensor) -> Tensor:
    x = s.stem(x).flatten(2).transpose(1, 2)
    b, n, c = x.shape
    q, k, v = s.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
    x = F.scaled_dot_product_attention(q, k, v) if s.fused else (q @ k.transpose(-2, -1)).softmax(-1) @ v
    return s.out(s.proj(x.transpose(1, 2).reshape(b, n, c)))


def pooled(s: Any, x: Tensor) -> Tensor:
    x = F.relu(s.stem(x))
    return s.out(torch.bmm(s.maps(x).flatten(2).softmax(-1), x.flatten(2).transpose(1, 2)))


def tokens(s: Any, x: Tensor) -> Tensor:
    return s.out(s.mid(s.stem(x).flatten(2).transpose(1, 2)))


def with_heads(fused: bool) -> nn.Module:
    net = Net(heads, stem=conv(3, 16, 1), qkv=nn.Linear(16, 48), proj=nn.Linear(16, 16), out=nn.Linear(16, 4))
    net.fused = fused
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Net(
        tokens,
        stem=stem(8),
        mid=nn.TransformerEncoderLayer(8, 2, 20, batch_first=True, dropout=0.0),
        out=nn.Linear(8, 4),
    ),
    "lstm": lambda: Net(
        lambda s, x: s.out(s.mid(s.stem(x).flatten(2).transpose(1, 2))[0]),
        stem=stem(8),
        mid=nn.LSTM(8, 6, batch_first=True),
        out=nn.Linear(6, 4),
    ),
    "leaf": lambda: nn.Sequential(stem(8), nn.Sequential(conv(8, 12, 3), nn.ReLU(), conv(12, 4, 3))),
    "in parts": InParts,
    "windows": lambda: Net(
        windows, stem=conv(3, 16, 1), one=nn.Linear(16, 24), two=nn.Linear(24, 16), out=conv(16, 4, 1)
    ),
    "heads": lambda: with_heads(False),
    "fused heads": lambda: with_heads(True),
    "pooled by maps": lambda: Net(pooled, stem=stem(16), maps=conv(16, 4, 1), out=nn.Linear(16, 4)),
    "positions first": lambda: Net(
        lambda s, x: s.two(F.relu(s.one(s.stem(x).flatten(2).permute(2, 0, 1)))),
        stem=stem(8),
        one=nn.Linear(8, 16),
        two=nn.Linear(16, 4),
    ),
}


@pytest.mark.parametrize("cost", ["flops", "params"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_cost_is_that_of_the_network_that_comes_out(name: str, cost: str) -> None:
    model, x = NETWORKS[name]().eval(), torch.randn(2, 3, 8, 8)
    leaves = ["1"] if name == "leaf" else []
    prepared = smcp_fx.prepare(model, x, cost=cost, leaves=leaves, config=smcp_fx.PruningConfig(multiple=1))
    assert bool(prepared.regions) == (name == "in parts")
    pruner = prepared.pruner
    networks = [(pruner.full_cost, model)]
    for seed in range(2):
        prepared.set_masks(random_masks(prepared, seed))
        networks.append((pruner.cost.cost(pruner.counts), smcp_fx.convert(prepared)))
    for told, network in networks:
        assert told == pytest.approx(seen(network, x) / 2 if cost == "flops" else size_of(network), rel=1e-9)
    assert networks[1][0] < networks[0][0]


def test_half_is_half_of_the_whole() -> None:
    """An opaque half of a network stays: half of the whole is what is asked for."""
    model = nn.Sequential(
        conv(3, 64, 3), nn.ReLU(), conv(64, 8, 3), nn.Sequential(conv(8, 32, 3), conv(32, 4, 3))
    )
    x = torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(model, x, target=0.6, leaves=["3"])
    prepared(x).square().mean().backward()
    prepared.pruner.step()
    prepared.pruner.solve()
    left = seen(smcp_fx.convert(prepared), x) / seen(model, x)
    assert 0.5 < left <= 0.6


def test_an_unbatched_input_is_one_image() -> None:
    model, x = nn.Sequential(conv(3, 8, 3), nn.ReLU(), conv(8, 4, 3)), torch.randn(3, 8, 8)
    assert smcp_fx.prepare(model, x).pruner.full_cost == seen(model, x)


def test_the_count_needs_no_graph_later() -> None:
    """Recipes and reports ask for it when the prepared model's graph holds masks, or none is at hand."""

    model, x = NETWORKS["encoder"](), torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(model, x)
    assert prepared.plan.flops.cost(prepared.pruner.counts) == pytest.approx(prepared.pruner.full_cost)
