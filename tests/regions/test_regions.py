"""Models whose top cannot be traced: split into regions, pruned across them, and exact; modules kept as leaves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import chain, random_masks, randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.channels.graph import Group
from smcp_fx.checkpoint import load_checkpoint, save_checkpoint
from smcp_fx.errors import BackendError, CheckpointError, InputError, TraceError

CONFIG = smcp_fx.PruningConfig(multiple=1, batch_norm_scaling=True)
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5)).double()


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Split(nn.Module):
    """Stem, body and head, with Python between them that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 12)
        self.body = nn.Sequential(conv(12, 16), conv(16, 20))
        self.head = nn.Linear(20, 5)

    def between(self, f: Tensor) -> Tensor:
        return f

    def forward(self, x: Tensor) -> Tensor:
        f = self.between(self.stem(x))
        if f.shape[-1] < 4:
            raise ValueError("too small an image")
        y = self.body(f).mean((2, 3))
        if y.mean() > 1e6:  # no graph can hold this
            y = -y
        return self.head(y)


class Reads(Split):
    def between(self, f: Tensor) -> Tensor:
        self.seen = float(f.mean())
        return f


class Changes(Split):
    def between(self, f: Tensor) -> Tensor:
        f += 1
        return f


class Trains(Split):
    """Reads the stem's output while training only."""

    def between(self, f: Tensor) -> Tensor:
        if self.training:
            self.seen = f.square().mean()
        return f


class Pyramid(nn.Module):
    """A backbone that returns a dict, and a head that runs once a level, as detection models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Levels()
        self.head = PerLevel()

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        levels = self.backbone(torch.stack(images))
        boxes, *rest = self.head(list(levels.values()), names=list(levels))
        scores = torch.cat([boxes, *rest], 1)
        if scores.amax() > 1e6:
            raise ValueError("diverged")
        found = []
        for index in range(len(images)):
            keep = scores[index].amax(1) > -1e6
            found.append({"scores": scores[index][keep]})
        return found


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(3, 8), conv(8, 8, 2)
        self.across = nn.ModuleList([nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.one(x)
        return {"0": self.across[0](first), "1": self.across[1](self.two(first))}


class PerLevel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = conv(6, 10)
        self.out = nn.Conv2d(10, 4, 1)

    def forward(self, features: list[Tensor], names: list[str]) -> list[Tensor]:
        assert len(features) == len(names)
        return [self.out(self.shared(f)).permute(0, 2, 3, 1).flatten(1, 2) for f in features]


def prepare(model: nn.Module, inputs: Any = (IMAGES,), **options: Any) -> smcp_fx.PreparedModel:
    options.setdefault("config", CONFIG)
    return smcp_fx.prepare(randomise(model).double().eval(), inputs, **options)


def group(prepared: smcp_fx.PreparedModel, producer: str) -> Group:
    return next(g for g in prepared.channels.groups if producer in g.producers)


def outputs(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return model(*inputs)


def check_exact(prepared: smcp_fx.PreparedModel, inputs: tuple[Any, ...], seed: int = 0) -> nn.Module:
    """Mask at random, slice, compare; return the sliced model."""
    prepared.eval()
    prepared.set_masks(random_masks(prepared, seed))
    masked = outputs(prepared, inputs)
    sliced = smcp_fx.convert(prepared)
    assert_close(outputs(sliced, inputs), masked, "slicing", f"seed {seed}")
    assert_close(outputs(prepared, inputs), masked, "identity", "the prepared model after convert")
    assert not [name for name in sliced.state_dict() if name.startswith("smcp")]
    return sliced


# ---- regions --------------------------------------------------------------------------------------------


def test_regions_are_joined_where_tensors_go_straight() -> None:
    model = Split()
    prepared = prepare(model)
    assert prepared.regions == ("stem", "body", "head")
    assert_close(outputs(prepared, (IMAGES,)), outputs(model, (IMAGES,)), "identity", "all channels kept")
    stem = group(prepared, "stem.0")
    assert stem.free
    assert stem.consumers == ("body.0.0",)
    assert group(prepared, "body.0.0").free
    last = group(prepared, "body.1.0")
    assert last.pinned == ("leaves the traced regions for code that was not traced",)
    # 12 + 16 of the 12 + 16 + 20 input channels; the 3 of the images come from Python, too
    assert prepared.channels.free_share == pytest.approx(28 / 51)
    for seed in range(3):
        sliced = check_exact(prepared, (IMAGES,), seed)
        kept = prepared.pruner.counts
        assert sliced.stem[0].out_channels == sliced.body[0][0].in_channels == kept["stem.0"]
        assert type(sliced) is Split


def test_the_reason_says_which_module_stopped_it_and_where() -> None:
    why = prepare(Split()).untraced[""]
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), start=1)
        if "if y.mean() > 1e6" in text
    )
    assert f"test_regions.py:{line} (if y.mean() > 1e6" in why

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Split()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).relu()

    prepared = prepare(Outer())
    assert prepared.regions == ("inner.stem", "inner.body", "inner.head")
    assert f"It stopped in module 'inner' (Split), at {__file__}:{line}" in prepared.untraced[""]
    check_exact(prepared, (IMAGES,))


@pytest.mark.parametrize("kind", [Reads, Changes, Trains])
def test_what_python_reads_between_regions_stays(kind: type[Split]) -> None:
    prepared = prepare(kind())
    assert not group(prepared, "stem.0").free
    assert group(prepared, "body.0.0").free
    check_exact(prepared, (IMAGES,))


def test_probing_leaves_the_model_and_the_generator_as_they_were() -> None:
    model = randomise(Split()).double()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    prepared = smcp_fx.prepare(model, (IMAGES,), config=CONFIG)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor)
        assert torch.equal(prepared.state_dict()[name], tensor)
    assert "forward" not in vars(model.stem)


def test_dicts_lists_keywords_and_levels() -> None:
    images = ([IMAGES[0], IMAGES[1]],)
    model = Pyramid()
    prepared = prepare(model, images)
    assert prepared.regions == ("backbone", "head")
    assert_close(outputs(prepared, images), outputs(model, images), "identity", "all channels kept")
    levels = group(prepared, "backbone.across.0")
    assert levels.free and set(levels.producers) == {"backbone.across.0", "backbone.across.1"}
    assert group(prepared, "head.shared.0").free
    for seed in range(3):
        check_exact(prepared, images, seed)
    larger = ([torch.randn(3, 24, 20).double() for _ in range(3)],)  # another batch, another resolution
    check_exact(prepared, larger, 7)


def test_cost_counts_every_call_once_an_image() -> None:
    model = randomise(Pyramid()).double().eval()
    total = 0

    def count(module: Any, args: Any, out: Tensor) -> None:
        nonlocal total
        total += out.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    images = ([IMAGES[0], IMAGES[1]],)
    outputs(model, images)
    prepared = prepare(Pyramid(), images)
    assert prepared.pruner.full_cost == pytest.approx(total / 2)


def test_another_structure_is_refused_with_advice() -> None:
    class Chooses(Pyramid):
        levels = 2

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            features = list(self.backbone(torch.stack(images)).values())[: self.levels]
            out = self.head(features, names=["a", "b"][: self.levels])
            return [{"scores": o} for o in out if o.amax() < 1e6]

    prepared = prepare(Chooses(), ([IMAGES[0]],))
    prepared.python.levels = 1  # type: ignore[attr-defined]
    words = r"'head' runs as a graph, traced with .*tensor, tensor.*; it is now called with \(\[tensor\]"
    with pytest.raises(InputError, match=words):
        outputs(prepared, ([IMAGES[0]],))


def test_weights_that_python_uses_too_are_left_alone() -> None:
    class Ties(Split):
        def __init__(self) -> None:
            super().__init__()
            self.probe = nn.ParameterList([self.stem[0].weight])

    prepared = prepare(Ties())
    assert prepared.regions == ("body", "head")
    assert prepared.untraced["stem"] == "it shares weights with a module that is not traced"
    check_exact(prepared, (IMAGES,))


def test_where_nothing_may_go_the_first_error_stands() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            return self.two(y if y.mean() > -1e6 else -y)

    with pytest.raises(TraceError, match=r"cannot trace Single.*It stopped at .*test_regions\.py") as caught:
        prepare(Single())
    assert "In the parts that can be traced (one, two) no channel may go" in str(caught.value)


def test_what_the_example_gives_nothing_stays() -> None:
    class Finds(Split):
        """Crops what it finds, and in the example it finds nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.crops = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1))

        def forward(self, x: Tensor) -> Any:
            found = x[[i for i in range(len(x)) if float(x[i].max()) > 1e6]]
            return super().forward(x), self.crops(found)

    prepared = prepare(Finds())
    assert "crops" not in prepared.regions
    assert "empty, of shape (0, 3," in prepared.untraced["crops"]
    check_exact(prepared, (IMAGES,))


# ---- living with it -------------------------------------------------------------------------------------


def test_training_solving_and_converting() -> None:
    prepared = prepare(Split(), config=smcp_fx.PruningConfig(multiple=4, batch_norm_scaling=True), target=0.5)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    prepared.train()
    for _ in range(3):
        loss = prepared(IMAGES).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert prepared.pruner.step() is None
        optimizer.step()
    solve = prepared.pruner.solve()
    assert solve.cost <= 0.5 * prepared.pruner.full_cost
    smaller = check_exact_as_it_is(prepared)
    smaller.train()
    smaller(IMAGES).sum().backward()
    assert all(parameter.grad is not None for parameter in smaller.parameters())


def check_exact_as_it_is(prepared: smcp_fx.PreparedModel) -> nn.Module:
    prepared.eval()
    sliced = smcp_fx.convert(prepared)
    assert_close(outputs(sliced, (IMAGES,)), outputs(prepared, (IMAGES,)), "slicing", "solved masks")
    return sliced


def test_modes_reach_the_regions() -> None:
    class Drops(Split):
        def __init__(self) -> None:
            super().__init__()
            self.stem.append(Halves())

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, self.training)

    prepared = prepare(Drops())
    assert "stem" in prepared.regions
    for model in (prepared, smcp_fx.convert(prepared)):
        model.eval()
        assert torch.equal(outputs(model, (IMAGES,)), outputs(model, (IMAGES,)))
        model.train()
        mean = model.get_buffer("stem.1.running_mean").clone()
        assert not torch.equal(outputs(model, (IMAGES,)), outputs(model, (IMAGES,)))
        assert not torch.equal(model.get_buffer("stem.1.running_mean"), mean)
        model.get_submodule("stem").eval()  # frozen
        mean = model.get_buffer("stem.1.running_mean").clone()
        outputs(model, (IMAGES,))
        assert torch.equal(model.get_buffer("stem.1.running_mean"), mean)


def test_state_copies_and_files(tmp_path: Path) -> None:
    model = Split()
    prepared = prepare(model)
    assert set(model.state_dict()) == {n for n in prepared.state_dict() if not n.startswith("smcp.")}
    prepared.load_state_dict(model.state_dict(), strict=False)
    prepared.set_masks(random_masks(prepared, 3))
    expected = outputs(prepared, (IMAGES,))
    copied = copy.deepcopy(prepared)
    fresh = prepare(Split())
    fresh.load_state_dict(prepared.state_dict())
    converted = smcp_fx.convert(prepared)
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.zero_()
    for other in (copied, smcp_fx.convert(copied), smcp_fx.convert(fresh), copy.deepcopy(converted)):
        assert_close(outputs(other, (IMAGES,)), expected, "slicing", type(other).__name__)
    with pytest.raises(CheckpointError, match=r"Split was traced in regions.*Save prepared\.state_dict\(\)"):
        smcp_fx.save(converted, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


class Exports(nn.Module):
    """What looks at values does so in eager mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(3, 8), conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        return y if torch.compiler.is_compiling() or y.mean() > -1e6 else -y


def test_onnx_and_checkpoints(tmp_path: Path) -> None:
    model = randomise(Exports()).eval()
    images = IMAGES.float()
    prepared = smcp_fx.prepare(model, (images,), config=CONFIG)
    assert prepared.regions == ("one", "two")
    prepared.set_masks(random_masks(prepared, 1))
    prepared.train()
    prepared(images).sum().backward()
    prepared.pruner.step()
    save_checkpoint(tmp_path / "run.safetensors", prepared)
    resumed = smcp_fx.prepare(model, (images,), config=CONFIG)
    load_checkpoint(tmp_path / "run.safetensors", resumed)
    assert torch.equal(resumed.smcp.gathered, prepared.smcp.gathered)
    smaller = smcp_fx.convert(resumed).eval()
    # The export runs the file in ONNX Runtime and compares.
    path = smcp_fx.export_onnx(smaller, (images,), tmp_path / "model.onnx")
    import onnx

    sizes = {tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    assert tuple(smaller.one[0].weight.shape) in sizes
    with pytest.raises(BackendError, match="cannot capture Split"):
        smcp_fx.export_onnx(smcp_fx.convert(prepare(Split())).float(), (images,), tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_a_converted_region_works_alone_and_moves() -> None:
    sliced = check_exact(prepare(Split()), (IMAGES,), 4)
    whole = outputs(sliced.stem, (IMAGES,))
    alone = copy.deepcopy(sliced.stem).float()
    assert_close(outputs(alone, (IMAGES.float(),)), whole.float(), "slicing", "a region taken out")
    assert outputs(sliced.float(), (IMAGES.float(),)).dtype == torch.float32


class Scaled(nn.Module):
    """Keeps a scale that is neither parameter nor buffer; what holds it moves it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(20, 20, 1)
        self.scale = torch.linspace(0.5, 1.5, 20).view(-1, 1, 1).double()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.scale = fn(self.scale)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() * self.scale


def test_plain_tensors_of_a_region_are_read_there_as_they_are() -> None:
    model = Split()
    model.body = nn.Sequential(conv(12, 16), conv(16, 20))
    model.stem = nn.Sequential(conv(3, 20), Scaled(), nn.Conv2d(20, 12, 1))
    nested = check_exact(prepare(model), (IMAGES,), 4)
    model.stem, model.body = conv(3, 20), Scaled()  # the region is the module that holds it
    sliced = check_exact(prepare(model), (IMAGES,), 4)
    for each in (nested, sliced):
        expected = outputs(each, (IMAGES,))
        found = outputs(copy.deepcopy(each).float(), (IMAGES.float(),))
        assert_close(found, expected.float(), "slicing", "in another precision")


# ---- leaves ---------------------------------------------------------------------------------------------


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) if x.mean() > -1e6 else x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(3, 24), conv(24, 16))
        self.gate = Gate()
        self.last = nn.Sequential(conv(16, 24), nn.Conv2d(24, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


def test_a_leaf_stays_and_pins_what_it_touches() -> None:
    prepared = prepare(Gated(), leaves=["gate"])
    assert prepared.regions == ()
    assert group(prepared, "first.1.0").pinned == ("'gate' is left as it is",)
    assert group(prepared, "first.0.0").free and group(prepared, "last.0.0").free
    assert not any("gate" in layer.path for layer in prepared.channels.layers)
    sliced = check_exact(prepared, (IMAGES,))
    assert sliced.gate.mix.weight.shape == (16, 16, 1, 1)


def test_a_layer_can_be_a_leaf_and_its_shared_weight_stays() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.last.weight = self.again.weight
            self.end = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.last(torch.relu(self.again(torch.relu(self.first(x))))))

    free = prepare(Shared())
    assert group(free, "first").free
    prepared = prepare(Shared(), leaves=["last"])
    assert not any(g.free for g in prepared.channels.groups)
    assert "'last' is left as it is" in group(prepared, "again").pinned


def test_leaves_are_kept_inside_regions_and_out_of_them() -> None:
    prepared = prepare(Split(), leaves=["head", "stem"])
    assert prepared.regions == ("body",)
    assert group(prepared, "body.0.0").free
    check_exact(prepared, (IMAGES,))

    class Deep(Split):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(conv(12, 16), conv(16, 16), Gate(), conv(16, 20))

    prepared = prepare(Deep(), leaves=["body.2"])
    assert prepared.regions == ("stem", "body", "head")
    assert group(prepared, "stem.0").free
    check_exact(prepared, (IMAGES,))


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        (["nothing"], "the model has no module 'nothing'; model.named_modules"),
        (["mix"], "did you mean gate.mix"),
        ("gate", "a list of module names, not the string 'gate'"),
    ],
)
def test_leaves_that_do_not_exist(leaves: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        prepare(Gated(), leaves=leaves)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script`:FutureWarning", "ignore:`torch.jit.script`:DeprecationWarning"
)
def test_scripted_modules_are_left_alone() -> None:
    """They take no hooks, and cannot be looked into."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = chain(6, 8)
            self.scripted = torch.jit.script(nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            return self.scripted(y) if float(y.detach().mean()) > -1e9 else y

    prepared = smcp_fx.prepare(Asks(), torch.randn(2, 3, 8, 8))
    assert prepared.regions == ("body",)


class CachesBySize(nn.Module):
    """Keeps a grid until the size of what it gets changes, as detection heads do."""

    shape: tuple[int, ...] = ()
    grid = torch.empty(0)  # a plain attribute, of the class at first

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        if self.shape != tuple(x.shape):
            self.grid = torch.arange(x.shape[-1], dtype=x.dtype).expand(x.shape[-2:])
            self.shape = tuple(x.shape)
        return self.conv(x) + self.grid


@pytest.mark.parametrize("called_before", [False, True])
def test_a_part_that_caches_by_size_takes_other_sizes(called_before: bool) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3), CachesBySize()

        def forward(self, x: Tensor) -> Tensor:
            """[N, 3, H, W]."""
            y = self.head(self.stem(x))
            return y if float(y.abs().amax()) < 1e9 else -y

    model = randomise(Whole()).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    if called_before:
        model(torch.randn(1, 3, 10, 10).double())
    prepared = smcp_fx.prepare(model, x, config=smcp_fx.PruningConfig(multiple=1))
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    for size in ((2, 3, 8, 8), (3, 3, 8, 8), (2, 3, 12, 10), (2, 3, 8, 8)):
        image = torch.randn(size).double()
        with torch.no_grad():
            assert_close(sliced(image), prepared(image), "slicing", str(size))
