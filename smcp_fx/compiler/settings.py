"""The settings of a compile run; the command line derives its flags from these fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from smcp_fx.backends import PRECISIONS, backend_names
from smcp_fx.config import MethodConfig, PruningConfig, option
from smcp_fx.costs.binding import absolute_target
from smcp_fx.errors import InputError
from smcp_fx.output_kinds import Kinds
from smcp_fx.schedule import Schedule
from smcp_fx.zoo.image_folder import AUGMENTATIONS
from smcp_fx.zoo.pretrained import Preprocessing

_MOST_EPOCHS, _MOST_WORKERS = 1e6, 256
_SCHEDULE = ("warmup", "ramp", "cooldown", "every")
#: Peak learning rates, from random weights and from trained ones. Chosen, not measured.
_RATE, _FINE_RATE = 0.05, 0.0075


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class CompileSettings:
    """One run of the compiler. ``of_backend``: the options that only its backend has."""

    model: str = option(
        "torchvision:resnet18",
        "torchvision:NAME, timm:NAME, onnx:FILE (with --epochs 0), or path/to/file.py:factory (called without "
        "arguments)",
    )
    weights: str | None = option(
        None,
        "state dict or training checkpoint to start from (.safetensors, or .pt without code); training the dense "
        "model is then skipped",
    )
    pretrained: bool = option(
        False, "start from the weights that torchvision or timm publishes for the model"
    )
    data: str = option(
        "digits",
        "digits (scikit-learn's), imagefolder:PATH (with train/ and val/ or test/ below it), images:PATH (without "
        "labels, for --epochs 0), npz:PATH (arrays by the names of an ONNX file's inputs), or "
        "path/to/file.py:factory returning (train, test) datasets",
    )
    input_size: str | None = option(
        None,
        "side of the images in pixels; of an ONNX file also the sizes of its inputs without the batch, as 3x48x320, "
        "several with commas (default: what the model's published weights, the file, or the data have)",
    )
    mean: str | None = option(
        None, "what is subtracted from each channel, of values in [0, 1]: 0.5 or 0.485,0.456,0.406"
    )
    std: str | None = option(None, "... and divided by")
    channel_order: str | None = option(
        None, "of image files (default: rgb, or what an ONNX file says)", ("rgb", "bgr")
    )
    outputs: str | None = option(
        None,
        "what the outputs are, where no labels tell: classes, binary or values; classes:2 for classes along "
        "dimension 2; of several outputs as scores=classes,boxes=values",
    )
    augment: str = option("usual", "how images of an imagefolder are varied in training", AUGMENTATIONS)
    workers: int | None = option(
        None, "processes that load images (default: one a core, up to 8, for an imagefolder; else 0)"
    )
    device: str | None = option(None, "where to train: cpu, cuda, cuda:1 (default: cuda where there is one)")
    amp: bool = option(False, "train in mixed precision: float16 on a GPU, bfloat16 on a CPU")
    target: str = option("0.4", "fraction of the dense cost to reach, or an absolute cost such as '12 ms'")
    cost: str = option("latency", "what the target is in", ("latency", "flops", "params"))
    backend: str = option("onnxruntime", "what the latency is measured in", backend_names())
    precision: str | None = option(
        None, "precision that the network runs in (default: the runtime's own)", PRECISIONS
    )
    int8_keep: int = option(
        0,
        "with --precision int8: so many layers stay in float32, those whose quantisation alone changes the dense "
        "network's answers most",
    )
    threads: int = option(1, "threads of the measured runtime")
    batch: int = option(1, "batch size that the latency is measured at")
    train_batch: int = option(64, "batch size of training")
    dense_epochs: float = option(
        5,
        "epochs the dense model is trained for, when it starts without weights, or without those of its last layer",
    )
    epochs: float = option(
        12,
        "epochs of fine-tuning; 0: without training, in minutes",
    )
    prune: str = option(
        "before",
        "when channels go: before the epochs, those that the others make up for best, and what is left is repaired; "
        "or during them, by soft masks on a schedule (SMCP)",
        ("before", "during"),
    )
    taught: float = option(
        0.9,
        "share of the dense network's answers in what the smaller network learns from, in [0, 1]; 0: labels alone",
    )
    calibration: int = option(
        512, "training images that channels are chosen and repaired by, before the epochs"
    )
    targets: tuple[float, ...] = option(
        (),
        "without training: fractions for a trade-off curve, in place of --target, each with files of its own",
    )
    lr: float | None = option(
        None,
        f"peak learning rate of the dense training; pruning peaks at two thirds of it (default: {_RATE}, or "
        f"{_FINE_RATE} from weights)",
    )
    weight_decay: float = option(1e-4, "weight decay")
    warmup: float | None = option(
        None, "with --prune during: epochs before pruning starts (K_w); default: the paper's share"
    )
    ramp: float | None = option(
        None, "with --prune during: epochs until the target is reached (K_t); default: the paper's share"
    )
    cooldown: float | None = option(
        None, "with --prune during: epochs with fixed masks at the end (K_c); default: the paper's share"
    )
    every: int | None = option(
        None, "with --prune during: steps between two solves (r); default: about 24 solves, at most 80 steps"
    )
    table: str | None = option(None, "latency table to use and extend (default: table.sqlite beside --out)")
    allow_fingerprint: bool = option(
        False, "use the rows of --table although they are of another device, runtime or version"
    )
    out: str | None = option(
        None, "folder for the files (default: runs/compile, or the next free one of runs/compile-2 and so on)"
    )
    seed: int = option(0, "seed of everything random")
    resume: bool = option(False, "go on with an interrupted run in --out (default: the last one in runs/)")
    overwrite: bool = option(False, "replace the run that is in --out")
    allow_missed: bool = option(False, "exit with success although the measured target was missed")
    of_backend: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("threads", "batch", "train_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{_flag(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("epochs", "dense_epochs", "warmup", "ramp", "cooldown"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _MOST_EPOCHS:
                raise InputError(f"{_flag(name)} must be from 0 to {_MOST_EPOCHS:g} epochs, not {value}")
        if not 0 < self.rate < math.inf or not 0 <= self.weight_decay < math.inf:
            raise InputError("--lr must be positive, --weight-decay at least 0, and both finite")
        if not 0 <= self.taught <= 1:
            raise InputError(f"--taught must be a share in [0, 1], not {self.taught}")
        if self.calibration < 2:
            raise InputError(f"--calibration must be at least 2 images, not {self.calibration}")
        if self.int8_keep < 0 or (self.int8_keep and self.precision != "int8"):
            raise InputError(
                f"--int8-keep {self.int8_keep}: a number of layers, at least 0, and only with --precision int8"
            )
        if any(not 0 < target <= 1 for target in self.targets):
            raise InputError(
                f"--targets must be fractions in (0, 1], not {', '.join(map(str, self.targets))}"
            )
        if self.targets and self.trains:
            raise InputError("--targets are for runs without training: give --epochs 0, too")
        if not self.trains and self.resume:
            raise InputError(
                "a run without training takes minutes, and is not resumed: start it without --resume"
            )
        if self.data.startswith("images:") and (self.masks or (self.trains and self.taught == 0)):
            raise InputError(
                "images without labels train only what learns from the dense network: leave --prune and --taught as "
                "they are, or give an imagefolder with labels"
            )
        if self.input_size is not None and not self.model.startswith("onnx:") and self.side is None:
            raise InputError(f"--input-size must be a side of at least 1 pixel, not {self.input_size!r}")
        if self.workers is not None and not 0 <= self.workers <= _MOST_WORKERS:
            raise InputError(f"--workers must be from 0 to {_MOST_WORKERS}, not {self.workers}")
        if self.pretrained and self.weights is not None:
            raise InputError("--pretrained and --weights both say what to start from: give one of them")
        if self.every is not None and self.every < 1:
            raise InputError(f"--every must be at least 1 step, not {self.every}")
        options = [name for name in _SCHEDULE if getattr(self, name) is not None]
        if options and not self.masks:
            raise InputError(
                f"{_flag(options[0])} is of soft masks: give --prune during, too, and some --epochs"
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed must be from 0 to {2**32 - 1}, not {self.seed}")
        if self.out is not None and not self.out.strip():
            raise InputError("--out is empty: give a folder")
        if self.resume and self.overwrite:
            raise InputError("--resume goes on with a run and --overwrite replaces it: give one of them")
        # Refuse bad targets before anything is measured, with a full cost of 1 in place of the real one.
        absolute_target(
            self.wanted, 1.0, {"latency": "ms", "flops": "FLOPs", "params": "parameters"}[self.cost]
        )

    def prepared(self, images: Preprocessing) -> Preprocessing:
        """Return how images become inputs, with the changes that the flags ask for."""
        changed: dict[str, Any] = {
            name: _numbers(name, text)
            for name in ("mean", "std")
            if (text := getattr(self, name)) is not None
        }
        return replace(images, order=self.channel_order or images.order, **changed)

    @property
    def side(self) -> int | None:
        """The requested side of images; None if there is none."""
        asked = self.input_size or ""
        return int(asked) if asked.isdecimal() and int(asked) else None

    @property
    def kinds(self) -> Kinds | None:
        """The given kinds of outputs, as `read_outputs` takes them; None if not given."""
        if self.outputs is None or "=" not in self.outputs:
            return self.outputs
        pairs = [part.rpartition("=") for part in self.outputs.split(",")]
        return {name.strip(): kind.strip() for name, _, kind in pairs}

    @property
    def wanted(self) -> float | str:
        """The target as `smcp_fx.prepare` takes it."""
        try:
            return float(self.target)
        except ValueError:
            return self.target

    @property
    def trains(self) -> bool:
        """Whether there are epochs."""
        return self.epochs > 0

    @property
    def masks(self) -> bool:
        """Whether the run prunes while training, by soft masks."""
        return self.trains and self.prune == "during"

    @property
    def has_weights(self) -> bool:
        """Whether the model starts from trained weights."""
        return self.pretrained or self.weights is not None

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        return self.lr if self.lr is not None else _FINE_RATE if self.has_weights else _RATE

    @property
    def backend_options(self) -> dict[str, Any]:
        """The arguments of the backend."""
        return {"threads": self.threads, "precision": self.precision, **self.of_backend}

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.out or "runs/compile")

    def schedule(self, steps_per_epoch: int) -> Schedule | None:
        """The pruning schedule for data of this many steps an epoch; None if training does not prune."""
        if not self.masks:
            return None
        default = Schedule.scaled(self.epochs, steps_per_epoch, self.every)
        return Schedule(
            self.epochs,
            steps_per_epoch,
            default.warmup if self.warmup is None else self.warmup,
            default.ramp if self.ramp is None else self.ramp,
            default.cooldown if self.cooldown is None else self.cooldown,
            default.every,
        )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 3) or (name == "std" and min(numbers) <= 0):
        raise InputError(f"--{name} {text!r}: give one number or three, as 0.485,0.456,0.406")
    return numbers * (3 // len(numbers))


#: Settings that may change between a run and its resumption without changing its result.
_FREE = {"resume", "overwrite", "out", "allow_missed"}


def as_record(settings: CompileSettings, config: PruningConfig) -> dict[str, Any]:
    """Return the settings that a resumed run must share, as JSON values."""
    chosen = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in _FREE}
    method = {f.name: getattr(config, f.name) for f in fields(MethodConfig)}
    record: dict[str, Any] = json.loads(json.dumps({"settings": chosen, "config": method}))
    return record
