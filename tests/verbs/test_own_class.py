"""A smaller network in its own class, checked by running or refused; what graphs carry on of the original."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Residual, randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError
from smcp_fx.interface.carried import plain_attributes


class Mine(nn.Module):
    """Of every kind of module that says its sizes."""

    kind, names = "any", ("cat", "dog")

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.num_classes = classes
        self.num_features = self.widest = 32
        self.pretrained_cfg: dict[str, Any] = {
            "input_size": (3, 16, 16),
            "mean": (0.5,) * 3,
            "num_classes": 32,
        }
        self.kind = "mine"
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.PReLU(16))
        self.depthwise = nn.Conv2d(16, 32, 3, groups=16)
        self.norm = nn.GroupNorm(4, 32)
        self.up = nn.ConvTranspose2d(32, 24, 2, 2)
        self.grouped = nn.Conv2d(24, 32, 1, groups=4)
        self.head = nn.Linear(32, classes)
        self.scale = nn.Parameter(torch.rand(1, 32, 1, 1))

    def features(self, x: Tensor) -> Tensor:
        return self.grouped(self.up(self.norm(self.depthwise(self.stem(x))))) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Numbered(Mine):
    """Its forward knows how many channels there are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).view(x.shape[0], 32, -1).mean(2))


class Parted(Numbered):
    """It takes the first half of the channels."""

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.features(x).split(16, 1)
        return self.head(torch.cat([y, z.relu()], 1).mean((2, 3)))


def halved(model: nn.Module, x: Tensor, **options: Any) -> smcp_fx.PreparedModel:
    """Prepared, with masks that keep about half of each group, and those that were the whole at first."""
    torch.manual_seed(0)
    prepared = smcp_fx.prepare(randomise(model), x, config=MethodConfig(multiple=1, **options))
    masks = {name: torch.rand(mask.shape) < 0.5 for name, mask in prepared.masks.items()}
    free = {g.name for g in prepared.channels.groups if g.free}
    for mask in masks.values():
        mask[0] = True
    prepared.set_masks({name: mask for name, mask in masks.items() if name in free})
    return prepared


@pytest.mark.parametrize("network", [Mine, lambda: Residual(16, 24)])
def test_the_class_runs_at_the_widths_that_are_left(network: Any) -> None:
    model = network()
    size = 16 if isinstance(model, Mine) else 8
    x = torch.randn(2, 3, size, size)
    prepared = halved(model, x)
    before = copy.deepcopy(model.state_dict())
    own = smcp_fx.convert(prepared, into=model)
    graph = smcp_fx.convert(prepared)
    assert type(own) is type(model) and own.training == graph.training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    for images in (2, 5):
        x = torch.randn(images, 3, size, size)
        assert_close(own.eval()(x), graph.eval()(x), "slicing")
    assert {n: t.shape for n, t in own.state_dict().items()} == {
        n: t.shape for n, t in graph.state_dict().items()
    }
    assert sum(p.numel() for p in own.parameters()) < 0.8 * sum(p.numel() for p in model.parameters())
    for name, module in own.named_modules():  # what is printed is what is there
        if isinstance(module, nn.Conv2d):
            assert graph.widths()[name] == (module.in_channels, module.out_channels)
    if isinstance(own, Mine):
        assert own.kind == "mine" and own.features(x).shape[1] == own.grouped.out_channels < 32
    own.train()(x).square().mean().backward()


def test_fresh_instances_take_states_and_files(tmp_path: Path) -> None:
    model, x = Mine(), torch.randn(2, 3, 16, 16)
    smaller = smcp_fx.convert(halved(model, x)).eval()
    expected = smaller(x)
    smcp_fx.save(smaller, tmp_path / "smaller.safetensors")
    loaded = smcp_fx.load(tmp_path / "smaller.safetensors")
    assert_close(smcp_fx.resize(Mine(), loaded, x).eval()(x), expected, "slicing")
    own = smcp_fx.convert(halved(model, x), into=model).eval()
    fresh = Mine()
    with pytest.raises(InputError, match="how many groups 'norm' has is not in a state dict"):
        smcp_fx.resize(fresh, own.state_dict())
    assert fresh.norm.num_channels == fresh.norm.weight.numel() == 32  # as it was
    plain = smcp_fx.convert(halved(Residual(16, 24), torch.randn(2, 3, 8, 8)), into=Residual(16, 24)).eval()
    again = smcp_fx.resize(Residual(16, 24), plain.state_dict(), torch.randn(2, 3, 8, 8)).eval()
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(again(x), plain(x))
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)  # its parameters are the new ones
    again.train()(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (
            Numbered,
            r"Numbered does not run at these widths: in 'head' \(Linear\), .*shapes cannot be multiplied",
        ),
        (Parted, "Parted does not run at these widths: in forward, not enough values"),
    ],
)
def test_a_class_that_knows_its_widths_is_refused_and_left_as_it_was(network: Any, told: str) -> None:
    model, x = network(), torch.randn(2, 3, 16, 16)
    prepared = halved(model, x)
    before = {name: (id(value), value.shape) for name, value in model.named_parameters()}
    with pytest.raises(InputError, match=told):
        smcp_fx.convert(prepared, into=model)
    with pytest.raises(InputError, match=told):
        smcp_fx.resize(model, smcp_fx.convert(prepared), x)
    assert before == {name: (id(value), value.shape) for name, value in model.named_parameters()}
    smcp_fx.convert(prepared)


def test_a_class_that_computes_something_else_is_refused() -> None:
    class Mean(nn.Module):
        """A sum over channels, divided by a number that it keeps."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.second(y * y.shape[1] ** -0.5)

    x = torch.randn(2, 3, 8, 8)
    prepared = halved(Mean(), x)
    with pytest.raises(InputError, match=r"computes something else at these widths .* differs is 'second'"):
        smcp_fx.convert(prepared, into=Mean())
    with pytest.raises(InputError, match="Mine is not what the smaller model was made from"):
        smcp_fx.convert(prepared, into=Mine())


class Drawing(nn.Module):
    """Draws in a module, in a function, and in its own forward."""

    def __init__(self, share: float, slope: float = 0.1) -> None:
        super().__init__()
        self.share = share
        self.stem, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.drop = nn.Dropout(share) if share else nn.Identity()
        self.act, self.mix, self.head = nn.LeakyReLU(slope), nn.Conv2d(16, 16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.act(self.norm(self.stem(x))))
        if self.training and self.share:
            y = y + self.mix(y) * torch.bernoulli(torch.full((len(y), 1, 1, 1), 1 - self.share))
        else:
            y = y + self.mix(y)
        return self.head(nn.functional.dropout(y, self.share, self.training).mean((2, 3)))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_another_dropout_is_no_other_class(share: float) -> None:
    x = torch.randn(2, 3, 8, 8)
    prepared = halved(Drawing(0.1), x)
    graph = smcp_fx.convert(prepared).eval()
    fresh = smcp_fx.resize(Drawing(share), graph, x)
    assert_close(fresh.eval()(x), graph(x), "slicing")
    assert fresh.share == share
    assert smcp_fx.convert(prepared, into=Drawing(share)).stem.out_channels < 16
    with pytest.raises(InputError, match=r"'act.negative_slope' is 0.3 here, and 0.1 in the smaller"):
        smcp_fx.resize(Drawing(share, slope=0.3), graph, x)
    fresh = Drawing(share)
    fresh.norm.momentum = 0.5  # shows in a buffer alone
    with pytest.raises(InputError, match=r"train mode.*'norm.momentum' is 0.5 here, and 0.1 in the smaller"):
        smcp_fx.resize(fresh, graph, x)


def test_what_does_not_draw_is_compared_in_train_mode() -> None:
    class Other(nn.Conv2d):
        """Another function in training."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if self.training else 1)

    x, other = torch.randn(2, 3, 8, 8), Drawing(0.5)
    other.mix = Other(16, 16, 1)
    with pytest.raises(
        InputError, match="something else at these widths than the smaller model, in train mode"
    ):
        smcp_fx.resize(other, smcp_fx.convert(halved(Drawing(0.1), x)), x)


def test_kept_says_which_channels_of_which_module() -> None:
    model, x = Mine(), torch.randn(2, 3, 16, 16)
    smaller = smcp_fx.convert(halved(model, x))
    assert set(smaller.kept) == {"stem.0", "stem.1", "depthwise", "up", "grouped", "head"}
    ins, outs = smaller.kept["head"]
    assert torch.equal(smaller.head.weight, model.head.weight[outs][:, ins])
    ins, outs = smaller.kept["up"]
    assert torch.equal(smaller.up.weight, model.up.weight[ins][:, outs])
    assert torch.equal(
        smaller.get_submodule("stem.1").running_mean, model.stem[1].running_mean[smaller.kept["stem.1"][0]]
    )
    assert smaller.widths()["head"] == (len(ins) and smaller.head.in_features, 10)


def test_what_is_known_of_the_model_is_carried_on(tmp_path: Path) -> None:
    prepared = halved(Mine(32), torch.randn(2, 3, 16, 16))
    assert prepared.num_classes == 32
    smaller = smcp_fx.convert(prepared)
    smcp_fx.save(smaller, tmp_path / "s.safetensors")
    torch.save(smaller, tmp_path / "s.pt")
    pickled = torch.load(tmp_path / "s.pt", weights_only=False)
    for one in (smaller, copy.deepcopy(smaller), smcp_fx.load(tmp_path / "s.safetensors"), pickled):
        assert one.num_classes == 32 and one.kind == "mine" and one.names == ("cat", "dog")
        assert one.pretrained_cfg == Mine(32).pretrained_cfg
        assert one.num_features == smaller.head.in_features == 16  # 32 no longer
        assert not hasattr(one, "widest")
        assert one.kept == smaller.kept
    timm_data = pytest.importorskip("timm.data")
    assert timm_data.resolve_data_config(model=smaller)["mean"] == (0.5, 0.5, 0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`", "ignore:The TorchScript type system")
def test_what_is_carried_on_does_not_stop_torchscript(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    model.pretrained_cfg = Mine().pretrained_cfg
    smaller = smcp_fx.convert(halved(model, x)).eval()
    scripted = torch.jit.script(smaller)
    assert_close(scripted(x), smaller(x), "slicing")
    path = smcp_fx.save(smaller, tmp_path / "scripted.safetensors")  # scripting leaves marks on modules
    assert torch.equal(smcp_fx.load(path)(x), smaller(x))


class Annotated(nn.Module):
    """Its annotations are strings, as all of this file's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.last(self.first(x).relu())}


class Unknown(Annotated):
    """One of them names nothing."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)["y"]


Unknown.forward.__annotations__["return"] = "Nowhere"


@pytest.mark.filterwarnings("ignore:`torch.jit.script`", "ignore:The TorchScript type system")
@pytest.mark.parametrize("kind", [Annotated, Unknown])
def test_annotations_as_text_do_not_stop_torchscript(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 3, 16, 16)
    smaller = smcp_fx.convert(halved(kind(), x)).eval()
    assert_close(torch.jit.script(smaller)(x), smaller(x), "slicing")


def test_timms_parts_know_the_new_widths(tmp_path: Path) -> None:
    """Layer decay, `reset_classifier`, `num_features` and `feature_info`, of the graphs and of the own class."""
    timm = pytest.importorskip("timm")
    from timm.optim import create_optimizer_v2

    def groups(model: nn.Module) -> list[tuple[int, float]]:
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=0.1, layer_decay=0.5)
        return [(len(group["params"]), group["lr_scale"]) for group in optimizer.param_groups]

    x = torch.randn(2, 3, 32, 32)
    model = timm.create_model("test_convnext.r160_in1k", num_classes=10)
    prepared = halved(model, x)
    smaller = smcp_fx.convert(prepared)
    own = smcp_fx.convert(prepared, into=model)
    smcp_fx.save(smaller, tmp_path / "s.safetensors")
    loaded = smcp_fx.load(tmp_path / "s.safetensors")
    for one in (prepared, smaller, copy.deepcopy(smaller), loaded, own):
        assert groups(one) == groups(model)
    torch.save(smaller, tmp_path / "s.pt")
    width = smaller.widths()["head.fc"][0]
    assert width < model.num_features
    for one in (smaller, loaded, own, torch.load(tmp_path / "s.pt", weights_only=False)):
        assert one.num_features == width
        assert one.feature_info[-1]["num_chs"] == width
        assert [info["module"] for info in one.feature_info] == [
            info["module"] for info in model.feature_info
        ]
    own.reset_classifier(4)
    assert own.eval()(x).shape == (2, 4)
    vit = timm.create_model("test_vit.r160_in1k")
    assert set(plain_attributes(vit)["answers"]["no_weight_decay"][0]) == vit.no_weight_decay()


def test_a_timm_backbone_says_what_its_features_are() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_resnet.r160_in1k", features_only=True, out_indices=(1, 3))
    smaller = smcp_fx.convert(halved(model, torch.randn(2, 3, 32, 32)))
    assert smaller.feature_info.channels() == model.feature_info.channels()
    assert copy.deepcopy(smaller).feature_info.reduction() == model.feature_info.reduction()


def test_inputs_that_the_smaller_model_does_not_take_prove_nothing() -> None:
    model = randomise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    smaller = smcp_fx.convert(smcp_fx.prepare(model, torch.randn(2, 3, 8, 8)))
    with pytest.warns(UserWarning, match=r"does not run on the example inputs \(\[2, 5, 8, 8\],\)"):
        smcp_fx.resize(model, smaller, torch.randn(2, 5, 8, 8))
