"""Learning from the dense network: training draws a smaller network's outputs towards the dense one's.

(Knowledge distillation, Hinton, Vinyals and Dean 2015: with temperature T the divergence of the softened
distributions, times T squared so that its gradients keep their size.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smcp_fx.config import is_number
from smcp_fx.errors import InputError, SmcpError, first_line
from smcp_fx.interface.wrapping import is_prepared, require_whole, unwrapped
from smcp_fx.output_kinds import Kinds, Reading, named_tensors, read_outputs, spread, told
from smcp_fx.pruning.loop_watch import tell
from smcp_fx.tracing.copying import deep_copy
from smcp_fx.training.features import Student, hooked, require_modules


class Teacher:
    """A dense network that a smaller one learns from: ``loss = 0.1 * loss + 0.9 * teacher(images, outputs)``.

    Holds a copy of ``model`` in eval mode, without gradients, and moves it to the device of the outputs. It
    is no `nn.Module`, so that no optimiser, checkpoint or `DistributedDataParallel` includes it.

    Args:
        model: the trained network, before `prepare`.
        temperature: softens distributions, both the teacher's and the student's.
        outputs: the kinds of the model's outputs, as for `compress`; without them, a warning tells the kinds.
        features: blocks by module path, such as ``["layer2", "layer3"]``: their outputs are drawn together,
            too, on the channels that the student keeps. The student is called through `watch`.

    Raises `InputError` for a prepared model or no model, and for a temperature that is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float = 1.0,
        outputs: Kinds | None = None,
        features: Sequence[str] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Teacher needs an nn.Module, not {type(model).__name__}")
        if is_prepared(model):
            raise InputError(
                "a prepared model changes while it trains: make the Teacher of the model before prepare"
            )
        if not is_number(temperature) or not 0 < temperature < math.inf:
            raise InputError(f"temperature must be a positive number, not {temperature!r}")
        require_whole(model, "Teacher")
        self.model = deep_copy(unwrapped(model)).eval()
        for parameter in self.model.parameters():  # scripts have no requires_grad_
            parameter.requires_grad_(False)
        self.temperature = float(temperature)
        self.readings: dict[str, Reading] = {}
        self._outputs = outputs
        if isinstance(features, str):
            raise InputError(f"features must be a list of module paths, not {features!r}")
        require_modules(self.model, features)
        self.features = list(features)
        self._student: Student | None = None

    def watch(self, student: nn.Module) -> Student:
        """Return a callable that replaces the student and shows its features: ``teacher.watch(smaller)(x)``.

        ``student``: a prepared or converted model, or a module whose named blocks have all of their channels.
        """
        if not isinstance(student, nn.Module):
            raise InputError(f"watch needs an nn.Module, not {type(student).__name__}")
        self._student = Student(unwrapped(student), self.features)
        return self._student

    def __call__(self, inputs: Any, outputs: Any) -> Tensor:
        """Return the distance of the student's answers from the teacher's, a sum over the outputs that count.

        For class scores, and for yes or no, it is the mean Kullback-Leibler divergence in nats; for anything
        else, and for features, the squared error relative to the variance of the teacher's answers.

        ``inputs``: the student's inputs: a tensor, a tuple of several, or a dict of keyword inputs;
        ``outputs``: its outputs. Runs in the caller's `torch.autocast`; computes the distance in float32.

        Raises `InputError` if the two have different outputs, and for inputs that the teacher does not take.
        """
        theirs, student = named_tensors(outputs), self._student
        if self.features and (student is None or not student.found):
            raise InputError(
                "features are seen where the student is called through the teacher: call = teacher.watch(student), "
                "then outputs = call(images)"
            )
        with torch.no_grad(), hooked(self.model, self.features) as features:
            if theirs:
                self.model.to(next(iter(theirs.values())).device)
            answers = self._answer(inputs)
        ours, total = named_tensors(answers), []
        with torch.autocast(next(iter(ours.values())).device.type if ours else "cpu", enabled=False):
            read = {name: reading for name, reading in self._read(answers).items() if name in ours}
            if not read:
                raise InputError(
                    f"the teacher's output holds none of {list(self.readings)}, as it did at first: name what each "
                    "call returns, with Teacher(outputs={name: kind})"
                )
            for name, reading in read.items():
                mine = self._matching(name, theirs, ours[name])
                total.append(self._distance(reading, reading.scores(mine), reading.scores(ours[name])))
            if student is not None:
                total += student.distances(features)
        return torch.stack(total).sum()

    def _read(self, answers: Any) -> dict[str, Reading]:
        if not self.readings:
            self.readings = read_outputs(answers, self._outputs, None, self.model)
            if not all(reading.given for reading in self.readings.values()):
                kinds = told(self.readings, answers)
                tell(
                    f"the Teacher's {kinds}. If that is wrong, say what it is, with Teacher(outputs=).",
                    UserWarning,
                )
        return self.readings

    def _matching(self, name: str, theirs: Mapping[str, Tensor], mine: Tensor) -> Tensor:
        """Return the student's tensor of this name; a lone one by shape (GoogLeNet adds more in training)."""
        answer = theirs.get(name)
        if answer is None and len(self.readings) == 1:
            answer = next((tensor for tensor in theirs.values() if tensor.shape == mine.shape), None)
        if answer is None or answer.shape != mine.shape:
            shapes = {name: list(tensor.shape) for name, tensor in theirs.items()}
            raise InputError(
                f"the teacher's output{' ' + repr(name) if name else ''} is of shape {list(mine.shape)}, and the "
                f"student's outputs {shapes} are not: both must be the same for the same inputs. "
                "Teacher(outputs={name: kind}) names those that count"
            )
        return answer

    def _distance(self, reading: Reading, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the mean distance over images and positions, of tensors as `Reading.scores` gives them."""
        if reading.kind == "values":
            variance = spread(teacher)
            return (student - teacher).square().mean() / torch.where(variance > 0, variance, 1.0)
        student, teacher = student / self.temperature, teacher / self.temperature
        if reading.kind == "binary":  # two classes, whose scores are the logit and zero
            student, teacher = (torch.stack([t, torch.zeros_like(t)], -1) for t in (student, teacher))
        logs = student.log_softmax(-1), teacher.log_softmax(-1)
        divergence = F.kl_div(*logs, log_target=True, reduction="none").sum(-1).mean()
        return divergence * self.temperature**2

    def _answer(self, inputs: Any) -> Any:
        try:
            if isinstance(inputs, Mapping):
                return self.model(**inputs)
            return self.model(*inputs) if isinstance(inputs, (tuple, list)) else self.model(inputs)
        except (SmcpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise InputError(
                f"the teacher, a {type(self.model).__name__}, does not take these inputs ({first_line(error)}). Give "
                "what the student was called with, and what it returned: teacher(inputs, outputs)"
            ) from error

    def __repr__(self) -> str:
        read = "".join(f", {name} {reading}" for name, reading in self.readings.items())
        return f"<Teacher: {type(self.model).__name__}, temperature {self.temperature:g}{read}>"
