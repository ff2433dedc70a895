"""Prepared and converted models are called as the original is: options, names, lists and dicts of tensors."""

from __future__ import annotations

import copy
import enum
import itertools
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import randomise
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import AssumptionError, InputError

X, Z, T = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
MASK = (torch.rand(4, 1, 8, 8) > 0.3).float()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 16, 1),
        )
        self.head = nn.Linear(16, 5)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.norm(self.first(x)))))

    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Targets(Network):
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        scores = self.scores(x)
        return scores if targets is None else (F.cross_entropy(scores, targets), scores)


class Loss(Network):
    """Another structure, and more operations in training."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        scores = self.scores(x)
        if targets is None:
            return {"scores": scores}
        loss = F.cross_entropy(scores, targets)
        return loss + 0.1 * scores.square().mean() if self.training else loss


class Masked(Network):
    """The way parts before a layer."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.features(x)
        return self.head(y.mean((2, 3)) if mask is None else (y * mask).sum((2, 3)) / mask.sum((2, 3)))


class Flag(Network):
    def forward(self, x: Tensor, with_features: bool = False) -> Any:
        y = self.features(x)
        return (self.head(y.mean((2, 3))), y) if with_features else self.head(y.mean((2, 3)))


class Kind(Network):
    def forward(self, x: Tensor, targets: Tensor | None = None, kind: str = "scores") -> Any:
        scores = self.scores(x)
        return F.cross_entropy(scores, targets) if kind == "loss" and targets is not None else scores


def pruned(model: nn.Module, example: Any) -> smcp_fx.PreparedModel:
    torch.manual_seed(0)
    prepared = smcp_fx.prepare(randomise(model), example, config=smcp_fx.PruningConfig(multiple=1))
    masks = {g.name: torch.arange(g.size) % 2 == 0 for g in prepared.channels.groups if g.free}
    assert masks
    prepared.set_masks(masks)
    return prepared


@pytest.mark.parametrize(
    ("model", "example", "calls"),
    [
        (Targets, (X, T), [(X, T), (X,), (X, None)]),
        (Loss, (X, T), [(X, T), (X,)]),
        (Masked, (X, MASK), [(X, MASK), (X,)]),
        (Flag, (X, True), [(X, True), (X, False), (X,)]),
        (Kind, (X, T, "loss"), [(X, T, "loss"), (X,), (X, T)]),
    ],
)
def test_optional_arguments_may_be_left_out(model: Any, example: Any, calls: Any, tmp_path: Path) -> None:
    original = randomise(model())
    whole = smcp_fx.prepare(original, example)
    prepared = pruned(model(), example)
    converted = smcp_fx.convert(prepared)
    loaded = smcp_fx.load(smcp_fx.save(converted, tmp_path / "m.safetensors"))
    own = smcp_fx.convert(prepared, into=model())
    for call, training in itertools.product(calls, (False, True)):

        def of(module: nn.Module, call: Any = call, training: bool = training) -> Any:
            return copy.deepcopy(module).train(training)(*call)

        assert_close(of(whole), of(original), "identity")
        for smaller in (converted, loaded, own):
            assert_close(of(smaller), of(prepared), "slicing")


def test_no_channel_stays_for_a_call_that_no_one_asked_for() -> None:
    class Context(nn.Module):
        """Without a context, it reads its own input, whose channels could go otherwise."""

        def __init__(self) -> None:
            super().__init__()
            self.read, self.query, self.key = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            x = F.relu(self.read(x))
            return self.head(self.query(x) * self.key(x if context is None else context))

    example = torch.randn(2, 4), torch.randn(2, 16)
    prepared = smcp_fx.prepare(Context(), example)
    assert prepared.channels.free_share > 0.5
    with pytest.raises(AssumptionError, match="was traced with context, and is called without it"):
        prepared(example[0])
    assert prepared(*example).shape == (2, 3)


def test_other_calls_are_refused_in_words() -> None:
    prepared = smcp_fx.prepare(randomise(Kind()), X)
    for module in (prepared, smcp_fx.convert(prepared)):
        assert torch.equal(module(X), module(x=X)) and torch.equal(module(X), module(X, None, kind="scores"))
        told = (
            r"Kind was traced with kind='scores', its default, and is called with kind='loss'. .*into=model"
        )
        with pytest.raises(AssumptionError, match=told):
            module(X, kind="loss")
        with pytest.raises(AssumptionError, match="is called with a tensor targets"):
            module(X, T)
        for args, named in (((), {}), ((X, None, "scores", 3), {}), ((X,), {"size": 3}), ((X,), {"x": X})):
            with pytest.raises(InputError, match=r"Kind does not take this call: .* traced as forward\(x\)"):
                module(*args, **named)


class ByName(Network):
    def forward(self, x: Tensor, *, other: Tensor, scale: float = 1.0, **more: Tensor) -> Tensor:
        return self.scores(torch.cat([x, other, *more.values()])) * scale


class OptionsByName(Network):
    def forward(
        self, x: Tensor, doubled: bool = False, *, targets: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        scores = self.scores(x) * (2 if doubled else scale)
        return scores if targets is None else F.cross_entropy(scores, targets)


def test_options_by_name_may_be_left_out_and_keep_their_defaults() -> None:
    prepared = pruned(OptionsByName(), {"x": X, "targets": T}).eval()
    converted, own = smcp_fx.convert(prepared), smcp_fx.convert(prepared, into=OptionsByName())
    for call in ({"targets": T}, {}, {"targets": None}, {"targets": T, "scale": 1.0}):
        assert_close(converted(X, **call), prepared(X, **call), "slicing")
        assert_close(own(X, **call), prepared(X, **call), "slicing")
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), converted(X))
    for module in (prepared, converted):
        with pytest.raises(
            AssumptionError, match=r"traced with scale=1\.0, its default, and is called with scale=2"
        ):
            module(X, scale=2.0)
    required = smcp_fx.prepare(ByName(), {"x": X, "other": Z})
    assert torch.equal(required.eval()(X, other=Z, scale=1.0), required(X, other=Z))
    with pytest.raises(InputError, match="prepare the model with an example of such a call"):
        required(X)


class Guided(Network):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, shift: Tensor | None = None) -> Tensor:
        scores = self.scores(x if mask is None else x * mask)
        return scores if shift is None else scores + shift


class Framed(Network):
    def forward(self, x: Tensor, *others: Tensor, mask: Tensor | None = None) -> Tensor:
        x = sum(others, x)
        return self.scores(x if mask is None else x * mask)


SHIFT = torch.randn(4, 5)


@pytest.mark.parametrize(
    ("kind", "example", "calls"),
    [
        (Guided, {"x": X, "shift": SHIFT}, [((X, None), {"shift": SHIFT}), ((X,), {})]),
        (Guided, {"x": X, "mask": MASK, "shift": SHIFT}, [((X, MASK), {"shift": SHIFT}), ((X, MASK), {})]),
        (Framed, {"x": X, "mask": MASK}, [((X,), {"mask": MASK}), ((X,), {})]),
    ],
)
def test_places_are_the_models_own_where_it_takes_inputs_by_name_only(
    kind: Any, example: dict[str, Tensor], calls: list[Any]
) -> None:
    """The graph has an argument for each input; a call by position means the model's, or is refused."""
    prepared = pruned(kind(), example).eval()
    own = smcp_fx.convert(prepared, into=kind())
    for module in (prepared, converted := smcp_fx.convert(prepared)):
        for args, named in calls:
            assert_close(module(*args, **named), own(*args, **named), "slicing")
        with pytest.raises((AssumptionError, InputError), match="was traced"):
            module(*example.values())  # by place what has none
        with pytest.raises((AssumptionError, InputError), match="was traced"):
            module(X, MASK[:, :, :1], **{name: v for name, v in example.items() if name != "x"})
    again = smcp_fx.prepare(converted, example).eval()
    assert_close(again(**example), own(**example), "slicing")


class Several(Network):
    def forward(self, *images: Tensor) -> Tensor:
        return self.scores(images[0] - images[1])


@pytest.mark.parametrize(
    ("model", "example"), [(ByName, {"x": X, "other": Z, "third": X}), (Several, (X, Z))]
)
def test_inputs_without_a_place_of_their_own(model: Any, example: Any) -> None:
    original = randomise(model())

    def of(module: nn.Module) -> Any:
        return module.eval()(**example) if isinstance(example, dict) else module.eval()(*example)

    assert_close(of(smcp_fx.prepare(original, example)), of(original), "identity")
    prepared = pruned(model(), example)
    assert_close(of(smcp_fx.convert(prepared)), of(prepared), "slicing")
    own = smcp_fx.convert(prepared, into=model())
    assert type(own) is model
    assert_close(of(own), of(prepared), "slicing")


class Part(enum.Enum):
    SCORES, BOTH = 1, 2


@dataclass
class Options:
    gain: float = 2.0
    rectified: bool = True


class Shifted(Network):
    """Defaults of kinds that a graph's code cannot name."""

    def forward(self, x: Tensor, shift: Tensor = SHIFT, options: Options = Options()) -> Tensor:  # noqa: B008
        scores = self.scores(x) * options.gain + shift
        return F.relu(scores) if options.rectified else scores


class Parts(Network):
    def forward(self, x: Tensor, part: Part = Part.SCORES) -> Any:
        scores = self.scores(x)
        return scores if part is Part.SCORES else (scores, scores.softmax(1))


def test_defaults_may_be_tensors_objects_and_members_of_enums() -> None:
    for kind, example, other in (
        (Shifted, (X,), (X, SHIFT)),
        (Shifted, (X, -SHIFT, Options(3.0)), (X,)),
        (Parts, (X, Part.SCORES), (X, Part.BOTH)),
        (Parts, (X, Part.BOTH), None),
    ):
        prepared = pruned(kind(), example).eval()
        original = randomise(kind()).eval()
        original.load_state_dict(
            {k: v for k, v in prepared.state_dict().items() if k in original.state_dict()}
        )
        assert_close(smcp_fx.prepare(original, example)(*example), original(*example), "identity")
        for module in (prepared, smcp_fx.convert(prepared)):
            assert_close(module(*example), prepared(*example), "slicing")
            if other is None:  # the call that leaves it out was traced, too
                assert_close(module(X), prepared(*example)[0], "slicing")
                continue
            with pytest.raises((AssumptionError, InputError), match="traced"):
                module(*other)


@dataclass(frozen=True)
class Frozen:
    gain: float = 2.0


OPTIONS = (
    ("scores", "both"),
    (False, True),
    (Part.SCORES, Part.BOTH),
    (torch.float32, torch.float64),
    (torch.device("cpu"), torch.device("meta")),
    (torch.contiguous_format, torch.channels_last),
    (None, "both"),
)


def switched(default: Any, *, frozen: bool = False) -> Network:
    """Asks by identity, by value, by text and as a key what one argument is."""

    class Switched(Network):
        def forward(self, x: Tensor, option: Any = default, gain: float = 2.0) -> Tensor:
            scores = self.scores(x)
            same = option == default if frozen or isinstance(default, torch.device) else option is default
            known = frozen or (str(option) == str(default) and {default: True}.get(option, False))
            return scores * gain if same and known else scores.softmax(1)

    return randomise(Switched())


@pytest.mark.parametrize(("default", "other"), [*OPTIONS, (Frozen(), Frozen(3.0))])
def test_options_given_outright_are_constants(default: Any, other: Any, tmp_path: Path) -> None:
    frozen = isinstance(default, Frozen)
    model = switched(default, frozen=frozen).eval()
    for example in ((X,), (X, default), (X, other)):
        prepared = smcp_fx.prepare(model, example).eval()
        assert prepared.channels.free_share > 0.5 and not prepared.regions
        assert torch.equal(prepared(*example), model(*example))
        if example[1:] != (other,):
            assert torch.equal(prepared(X, default), model(X))
            with pytest.raises(AssumptionError, match="option"):
                prepared(X, other)
    converted = smcp_fx.convert(smcp_fx.prepare(model, X))
    loaded = smcp_fx.load(smcp_fx.save(converted, tmp_path / "m.safetensors"))
    assert torch.equal(loaded.eval()(X), model(X))


@pytest.mark.parametrize("default", [Part.SCORES, None, True])
def test_options_of_a_decorated_forward(default: Any) -> None:
    model = switched(default).eval()
    plain = type(model).forward
    type(model).forward = torch.autocast("cpu", enabled=False)(plain)  # type: ignore[assignment]
    prepared = smcp_fx.prepare(model, (X, default)).eval()
    assert torch.equal(prepared(X, default), model(X, default))


@pytest.mark.parametrize("default", [default for default, _ in OPTIONS])
def test_parts_called_with_defaults_are_traced(default: Any) -> None:
    """A default is no reason to leave a part to Python, be it left out or given."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = switched(default)

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:  # no graph holds this
                return x
            return self.part(x) + self.part(x, default, 2.0)

    around = Around().eval()
    prepared = smcp_fx.prepare(around, X).eval()
    assert prepared.regions == ("part",)
    assert_close(prepared(X), around(X), "identity")


class Pair(Network):
    def forward(self, pair: list[Tensor], options: Tensor | None = None) -> Tensor:
        return self.scores(pair[0]) + self.scores(pair[1])


class Named(Network):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.scores(batch["left"]) + self.scores(batch["right"]["image"])


class Two(Network):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.scores(left) + self.scores(right)


LEFT_RIGHT = {"left": X, "right": {"image": Z}}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Pair, [X, Z]),  # as a data loader gives it
        (Pair, ([X, Z],)),
        (Named, LEFT_RIGHT),
        (Named, (LEFT_RIGHT,)),
        (Two, (X, Z)),
        (Two, {"left": X, "right": Z}),
    ],
)
def test_batches_of_lists_and_dicts(model: Any, inputs: Any) -> None:
    batches = [(inputs, T)] * 2
    smaller = smcp_fx.compress(
        randomise(model()), batches, target=0.9, config=smcp_fx.PruningConfig(multiple=1)
    )
    smcp_fx.recalibrate(smaller, batches)
    assert smaller.get_submodule("head").in_features < 16 or smaller.get_submodule("second").in_channels < 16


#: What a model may do with a container, one that it takes, and those that give another result.
OF_CONTAINERS: dict[str, tuple[Any, Any, list[Any]]] = {
    "list": (sum, [X, Z], [[X, Z, X], [X]]),
    "unpacked": (lambda given: operator.sub(*given), [X, Z], [[X, Z, X]]),
    "len": (lambda given: given[0] / len(given), [X, Z], [[X, Z, X]]),
    "values": (lambda given: sum(given.values()), {"a": X, "b": Z}, [{"a": X}, {"a": X, "b": Z, "c": X}]),
    "keys": (lambda given: sum(given[k] for k in given), {"a": X}, [{"a": X, "b": Z}, {"b": X}]),
    "in": (lambda given: given["a"] * (2 if "b" in given else 1), {"a": X}, [{"a": X, "b": None}]),
    "get": (lambda given: given["a"] * given.get("b", 1), {"a": X}, [{"a": X, "b": MASK}]),
    "get it": (lambda given: given["a"] * given.get("b", 1), {"a": X, "b": MASK}, [{"a": X}]),
    "None": (
        lambda given: given["a"] * (1 if given["b"] is None else 2),
        {"a": X, "b": None},
        [{"a": X, "b": Z}],
    ),
}


@pytest.mark.parametrize("use", OF_CONTAINERS)
def test_containers_of_other_parts_are_refused(use: str, tmp_path: Path) -> None:
    read, example, others = OF_CONTAINERS[use]

    class Reading(Network):
        def forward(self, given: Any) -> Tensor:
            return self.scores(read(given))

    original = randomise(Reading()).eval()
    assert_close(smcp_fx.prepare(original, (example,)).eval()(example), original(example), "identity")
    prepared = pruned(Reading(), (example,)).eval()
    converted = smcp_fx.convert(prepared)
    loaded = smcp_fx.load(smcp_fx.save(converted, tmp_path / "m.safetensors")).eval()
    for module in (prepared, converted, loaded):
        assert_close(module(example), prepared(example), "slicing")
        for other in others:
            with pytest.raises(AssumptionError, match="traced for inputs where"):
                module(other)


@pytest.mark.parametrize(
    ("model", "example", "names"),
    [
        (Pair, ([X, Z],), ["pair_0", "pair_1"]),
        (Named, (LEFT_RIGHT,), ["batch_left", "batch_right_image"]),
        (Two, {"left": X, "right": Z}, ["left", "right"]),
        (Targets, (X,), ["x"]),
    ],
)
def test_onnx_files_have_an_input_for_each_tensor(
    model: Any, example: Any, names: list[str], tmp_path: Path
) -> None:
    import onnxruntime

    prepared = pruned(model(), (X, T) if model is Targets else example)
    converted = smcp_fx.convert(prepared).eval()
    file = smcp_fx.export_onnx(converted, example, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == names
    given = dict(zip(names, (X, Z), strict=False))
    (found,) = session.run(None, {name: np.asarray(tensor) for name, tensor in given.items()})
    expected = converted(**example) if isinstance(example, dict) else converted(*example)
    assert_close(torch.from_numpy(found), expected.detach(), "accumulation")
