"""One weight that several calls read, along one dimension or along two, as it is or with its dimensions moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import IMAGE, Net, check_slicing, conv, free_parameter, random_masks, randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig

Wiring = Callable[..., Tensor]
INNER = 12  # channels of the code; the stem has 8


def last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def autoencoder(encode: Wiring, decode: Wiring, norm: bool = False, **parts: Any) -> Net:
    """``out(decode(mid(encode(stem(x)))))``; ``masks`` of channels, when given, hold before whatever reads these."""

    def wiring(s: Any, x: Tensor, masks: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        def read(h: Tensor, place: int) -> Tensor:
            return h if masks is None else h * masks[place].view(-1, 1, 1)

        h = F.relu(s.stem(x))
        h = F.relu(encode(s, read(h, 0)))
        h = F.relu(s.mid(read(h, 1)))
        h = F.relu(decode(s, read(h, 2)))
        return s.out(read(s.norm(h) if norm else h, 0))  # type: ignore[no-any-return]

    held = {"norm": nn.BatchNorm2d(8)} if norm else {}
    return Net(wiring, stem=conv(3, 8), mid=conv(INNER, INNER, 1), out=conv(8, 4), **held, **parts)


def two_modules() -> Net:
    w, back = conv(8, INNER), nn.ConvTranspose2d(INNER, 8, 3, padding=1)
    back.weight = w.weight
    return autoencoder(lambda s, x: s.w(x), lambda s, z: s.back(z), w=w, back=back)


def of_one_dimension() -> Net:
    def decode(s: Any, z: Tensor) -> Tensor:
        return F.conv_transpose1d(z.flatten(2), s.w, padding=1).unflatten(2, (8, 8))

    return autoencoder(
        lambda s, x: F.conv1d(x.flatten(2), s.w, padding=1).unflatten(2, (8, 8)),
        decode,
        w=free_parameter(INNER, 8, 3),
    )


def of_three_dimensions() -> Net:
    return autoencoder(
        lambda s, x: F.conv3d(x[:, :, None], s.w, padding=(0, 1, 1)).squeeze(2),
        lambda s, z: F.conv_transpose3d(z[:, :, None], s.w, padding=(0, 1, 1)).squeeze(2),
        w=free_parameter(INNER, 8, 1, 3, 3),
    )


def matrix(encode: Wiring, decode: Wiring) -> Net:
    return autoencoder(encode, decode, w=nn.Linear(8, INNER))


TIED: dict[str, Callable[[], Net]] = {
    "convolution": lambda: autoencoder(
        lambda s, x: s.w(x),
        lambda s, z: F.conv_transpose2d(z, s.w.weight, padding=1),
        norm=True,
        w=conv(8, INNER),
    ),
    "transposed first": lambda: autoencoder(
        lambda s, x: F.conv_transpose2d(x, s.w, padding=1),
        lambda s, z: F.conv2d(z, s.w, padding=1),
        norm=True,
        w=free_parameter(8, INNER, 3, 3),
    ),
    "groups": lambda: autoencoder(
        lambda s, x: s.w(x),
        lambda s, z: F.conv_transpose2d(z, s.w.weight, padding=1, groups=2),
        w=conv(8, INNER, groups=2),
    ),
    "two modules": two_modules,
    "one dimension": of_one_dimension,
    "three dimensions": of_three_dimensions,
    "product": lambda: matrix(lambda s, x: first(s.w(last(x))), lambda s, z: first(last(z) @ s.w.weight)),
    "t()": lambda: matrix(
        lambda s, x: first(s.w(last(x))), lambda s, z: first(F.linear(last(z), s.w.weight.t()))
    ),
    "mT": lambda: matrix(
        lambda s, x: first(torch.matmul(last(x), s.w.weight.mT)), lambda s, z: first(last(z) @ s.w.weight)
    ),
    "sizes of one": lambda: matrix(
        lambda s, x: F.conv2d(x, s.w.weight[:, :, None, None], s.w.bias),
        lambda s, z: F.conv_transpose2d(z, s.w.weight.view(INNER, 8, 1, 1)),
    ),
    "matrix on the left": lambda: matrix(
        lambda s, x: (s.w.weight @ x.flatten(2)).unflatten(2, (8, 8)),
        lambda s, z: (s.w.weight.T @ z.flatten(2)).unflatten(2, (8, 8)),
    ),
    "einsum": lambda: matrix(
        lambda s, x: torch.einsum("bchw,oc->bohw", x, s.w.weight),
        lambda s, z: torch.einsum("oc, bohw -> bchw", s.w.weight, z),
    ),
    "views": lambda: autoencoder(
        lambda s, x: first(F.linear(last(x), s.w.weight.flatten(1), s.w.bias)),
        lambda s, z: first(F.linear(last(z), s.w.weight.view(s.w.weight.size(0), -1).permute(1, 0))),
        w=conv(8, INNER, 1),
    ),
}


def masked(build: Callable[[], Net]) -> tuple[Net, smcp_fx.PreparedModel, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    model = randomise(build()).double()
    image = torch.randn(IMAGE, dtype=torch.float64)
    config = MethodConfig(multiple=1, batch_norm_scaling=False)
    found = smcp_fx.prepare(model.eval(), image, config=config)
    masks = random_masks(found, 3)
    found.set_masks(masks)
    return model, found, masks, image


@pytest.mark.parametrize("name", TIED)
def test_each_use_is_masked_along_its_own_dimension(name: str) -> None:
    """Against the network itself, with the channels set to zero before each layer that reads them."""
    check_slicing(TIED[name](), (torch.randn(IMAGE),), seeds=(0, 1))
    model, found, masks, image = masked(TIED[name])
    assert found.channels.free_share == 1
    stem, code, mid = (_of_units(found, path, masks) for path in ("stem", _encoder(found), "mid"))
    for mode in (False, True):
        expected = model.train(mode).wiring(model, image, (stem, code, mid))
        assert_close(found.train(mode)(image), expected, "identity", f"masked by hand, training {mode}")


def _encoder(found: smcp_fx.PreparedModel) -> str:
    return found.channels.layers[1].path


def _of_units(found: smcp_fx.PreparedModel, path: str, masks: dict[str, Tensor]) -> Tensor:
    """A 0 or 1 for each output channel of a layer."""
    graph = found.channels
    layer = next(la for la in graph.layers if la.path == path)
    units = graph.units.of(layer.output_channels)
    groups = [graph.groups[index].name for index in graph.group_of_unit[units].tolist()]
    places = graph.place_in_group[units].tolist()
    return torch.tensor([float(masks[name][place]) for name, place in zip(groups, places, strict=True)])


def test_importance_sums_over_both_uses() -> None:
    """|sum W * dL/dW| over each slice of the weight that a unit has, in every layer that reads it."""
    _, found, _, image = masked(TIED["convolution"])
    found.set_masks({g.name: torch.ones(g.size, dtype=torch.bool) for g in found.channels.groups})
    found.train()
    found(image).square().mean().backward()
    weights = dict(found.named_parameters())
    product = {name: (p.detach() * p.grad).double() for name, p in weights.items() if p.grad is not None}
    stem = product["w.weight"].sum((0, 2, 3)) + product["out.weight"].sum((0, 2, 3))
    # The code's channels have a unit each, and so have those of the layer in the middle.
    code, mid = product["mid.weight"].sum((0, 2, 3)), product["w.weight"].sum((1, 2, 3))
    found.pruner.step()
    state = found.smcp
    tied = code + mid
    share = 1 - found.pruner.config.momentum
    for name, expected in ("stem", stem), ("w", tied):
        gathered = state.of_group(state.gathered, name)
        assert_close(gathered, expected.abs().float() * share, "importance", name)


@pytest.mark.parametrize("cost", ["flops", "params"])
@pytest.mark.parametrize("name", ["convolution", "transposed first", "t()", "views"])
def test_what_is_promised_is_what_the_sliced_network_costs(name: str, cost: str) -> None:
    torch.manual_seed(0)
    model = TIED[name]()
    image = torch.randn(IMAGE)
    config = smcp_fx.PruningConfig(multiple=1)
    found = smcp_fx.prepare(model, image, target=0.5, cost=cost, config=config)
    found(image).square().mean().backward()
    found.pruner.step()
    solved = found.pruner.solve()
    again = smcp_fx.prepare(smcp_fx.convert(found), image, cost=cost, config=config)
    assert again.pruner.full_cost == pytest.approx(solved.cost)


def test_sizes_of_a_sliced_weight_are_what_they_were_where_they_are_numbers() -> None:
    def wiring(s: Any, x: Tensor) -> Tensor:
        h = F.conv2d(s.stem(x), s.w.weight[:, :, None, None])
        h = h.view(x.shape[0], s.w.weight.shape[0], 8, 8) * s.w.weight.size(1) ** -0.5
        return s.out(h / s.w.weight.shape[0])  # type: ignore[no-any-return]

    model = Net(wiring, stem=conv(3, 8), w=nn.Linear(8, INNER), out=conv(INNER, 4))
    assert check_slicing(model, (torch.randn(IMAGE),), seeds=(0, 1)).channels.free_share == 1


def test_a_weight_read_as_a_tensor_too_stays() -> None:
    def wiring(s: Any, x: Tensor) -> Tensor:
        h = first(F.linear(last(s.stem(x)), s.w.weight.t()))
        return s.out(h) * s.w.weight.t().abs().mean()  # type: ignore[no-any-return]

    model = Net(wiring, stem=conv(3, 8), w=nn.Linear(INNER, 8), out=conv(INNER, 4))
    assert check_slicing(model, (torch.randn(IMAGE),)).channels.free_share == 0
