"""What outputs are taken for, by names, labels, what is measured and what the model says; and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from smcp_fx.errors import InputError
from smcp_fx.output_kinds import named_tensors, read_outputs, spread, told


@dataclass
class Answer:
    logits: Tensor
    boxes: list[Tensor]


@dataclass(slots=True)
class Slots:
    a: Tensor
    b: dict[str, Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_tensors_are_named_by_the_path_to_them() -> None:
    x, other = normal(2, 3), torch.arange(2)
    found = named_tensors(
        {"a": [x, (other, {"b": x})], "c": Answer(x, [x]), "d": None, "e": x.sum(), 0: x[:0]}
    )
    assert list(found) == ["a.0", "a.1.1.b", "c.logits", "c.boxes.0"]
    assert list(named_tensors(x)) == [""]
    assert list(named_tensors(SimpleNamespace(y=x, n=3))) == ["y"]
    assert list(named_tensors(Slots(x, {"c": x}))) == ["a", "b.c"]


CASES: dict[str, tuple[Tensor, Tensor | None, Any]] = {
    # output, labels, (kind, dimension, probabilities, given)
    "nothing tells": (normal(4, 10), None, ("values", 1, False, False)),
    "numbers of classes": (normal(4, 10), torch.arange(4), ("classes", 1, False, True)),
    "a map of classes": (normal(4, 3, 8, 6), torch.ones(4, 8, 6).long(), ("classes", 1, False, True)),
    "classes of a sequence": (normal(4, 7, 9), torch.ones(4, 7).long(), ("classes", 2, False, True)),
    "classes first": (normal(4, 9, 7), torch.ones(4, 7).long(), ("classes", 1, False, True)),
    "one-hot labels": (normal(4, 5), torch.eye(5)[:4], ("classes", 1, False, True)),
    "soft labels": (normal(4, 5), normal(4, 5).softmax(1), ("classes", 1, False, True)),
    "several labels": (normal(4, 5), (normal(4, 5) > 0).float(), ("binary", 1, False, False)),
    "several labels, whole": (normal(4, 5), (normal(4, 5) > 0).long(), ("binary", 1, False, False)),
    "a mask": (normal(4, 1, 6, 6), normal(4, 6, 6) > 0, ("binary", 1, False, False)),
    "a mask of probabilities": (normal(4, 1, 6, 6).sigmoid(), normal(4, 1, 6, 6) > 0, ("binary", 1, True, False)),
    "yes or no": (normal(4, 1), torch.tensor([0, 1, 1, 0]), ("binary", 1, False, False)),
    "an age": (normal(4, 1), torch.tensor([10, 41, 31, 80]), ("values", 1, False, False)),
    "key points": (normal(4, 8), normal(4, 8), ("values", 1, False, False)),
    "heat maps": (normal(4, 8, 6, 6), normal(4, 8, 6, 6).sigmoid(), ("values", 1, False, False)),
    "probabilities": (normal(4, 5).softmax(1), None, ("classes", 1, True, False)),
    "probabilities of a sequence": (normal(4, 7, 9).softmax(2), None, ("classes", 2, True, False)),
    "their logarithms": (normal(4, 7, 9).log_softmax(1), None, ("classes", 1, False, False)),
    "in half precision": (normal(4, 500).half().softmax(1), None, ("classes", 1, True, False)),
    "shares of nothing": (normal(4, 5).sigmoid(), None, ("values", 1, False, False)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_is_read_by_what_tells(name: str) -> None:
    output, labels, expected = CASES[name]
    (found,) = read_outputs(output, None, labels).values()
    assert (found.kind, found.dim, found.probabilities, found.given) == expected
    scores = found.scores(output)
    if found.kind == "classes":
        assert scores.shape[-1] == output.shape[found.dim]
        if found.probabilities:
            torch.testing.assert_close(
                scores.softmax(-1), output.float().movedim(found.dim, -1), atol=2e-3, rtol=0
            )
    if found.kind == "binary" and found.probabilities:
        torch.testing.assert_close(scores.sigmoid(), output)


def test_the_user_has_the_last_word() -> None:
    outputs = {"a": normal(4, 5).softmax(1), "b": normal(4, 6, 7), "aux": normal(4, 2)}
    assert {r.kind for r in read_outputs(outputs, "values").values()} == {"values"}
    found = read_outputs(outputs, {"a": "classes", "b": "classes:1", "aux": "binary"})
    assert [(r.kind, r.dim, r.probabilities) for r in found.values()] == [
        ("classes", 1, True), ("classes", 1, False), ("binary", 1, False)
    ]  # fmt: skip
    assert list(read_outputs(outputs)) == ["a", "b"] and list(read_outputs({"aux": outputs["b"]})) == ["aux"]


def test_what_the_model_says_of_itself_is_evidence() -> None:
    model = SimpleNamespace(num_classes=6)
    assert read_outputs(normal(4, 6, 3, 3), model=model)[""].dim == 1
    assert read_outputs(normal(4, 7, 6), model=model)[""].dim == 2
    assert read_outputs(normal(4, 5), model=model)[""].kind == "values"
    assert read_outputs({"pred_logits": normal(4, 7, 5)})["pred_logits"].dim == 2
    for problem, kind in (("regression", "values"), ("multi_label_classification", "binary")):
        hugging = SimpleNamespace(config=SimpleNamespace(problem_type=problem, num_labels=5))
        assert read_outputs({"logits": normal(4, 5)}, model=hugging)["logits"].kind == kind


def test_it_is_told_in_plain_words() -> None:
    outputs = {"cls": normal(4, 5), "box": normal(4, 4), "hidden": normal(4, 3)}
    assert told(read_outputs(outputs), outputs) == (
        "output 'cls' [4, 5]: scores of classes along dimension 1 (by its name); 'box' [4, 4]: values, whose squared "
        "error counts relative to their variance; left out: 'hidden'"
    )


@pytest.mark.parametrize(
    ("outputs", "named", "labels", "said"),
    [
        (3, None, None, "holds no tensor"),
        (normal(4, 5), "boxes", None, "outputs= must be 'classes', 'binary' or 'values'"),
        (normal(4, 5), "values:1", None, "outputs= must be"),
        (normal(4, 5), "classes:0", None, "along dimension 0"),
        (normal(4, 1), "classes", None, "'binary' or 'values'"),
        (normal(4, 5), {"x": "values"}, None, "names 'x'"),
        (normal(4, 5), None, "cat", "labels are a str"),
        (normal(4, 5), None, normal(4, 3), "do not fit"),
        (normal(4, 5), None, normal(3, 5), "do not fit"),
        ((normal(4, 5), normal(4, 2)), None, torch.arange(4), "labels are one tensor, the outputs .0., .1."),
    ],
)
def test_what_does_not_fit_is_refused(outputs: Any, named: Any, labels: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_outputs(outputs, named, labels)


def test_spread_is_the_variance_over_images() -> None:
    x = normal(6, 3, 4)
    torch.testing.assert_close(spread(x + torch.arange(3)[:, None]), x.var(0, correction=0).mean())
    torch.testing.assert_close(spread(x[:1]), x[:1].var(correction=0))
    torch.testing.assert_close(spread(torch.full((3, 2), 5.0)), torch.tensor(25e-4))


@pytest.mark.parametrize(("kind", "instead"), [("binary", "logits"), ("classes", "scores")])
def test_logits_that_looked_like_probabilities_are_told(kind: str, instead: str) -> None:
    reading = read_outputs(normal(4, 2).softmax(1), kind)[""]
    assert reading.probabilities
    for late in ([[0.5, 1.5]], [[-0.5, 0.5]]):
        with pytest.raises(InputError, match=f"it holds {instead}: begin with a larger batch"):
            reading.scores(torch.tensor(late))
    assert bool(reading.scores(torch.tensor([[torch.nan, 0.5]])).isnan().any())  # told as what it is
