"""The settings of a recipe's run; the command line derives its flags from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from smcp_fx.config import option
from smcp_fx.errors import InputError


@dataclass(frozen=True)
class RunSettings:
    """One run of a recipe."""

    data: str | None = option(
        None,
        "folder of the data: train/ and val/ with a folder a class, or what VOCdevkit/ lies in; a dry run counts "
        "its images, or takes the paper's number without it",
    )
    weights: str | None = option(
        None,
        "weights to start from (.safetensors, or .pt without code), or none; default: what the recipe says",
    )
    dense: bool = option(False, "train the unpruned network: the baseline, if there is none")
    cost: str = option("latency", "what the target is a fraction of", ("latency", "flops", "params"))
    table: str | None = option(None, "latency table of the device that the network is for")
    backend: str = option("onnxruntime", "runtime that the table's rows are of")
    backend_device: str | None = option(None, "device of that runtime, such as cuda (default: its own)")
    threads: int = option(1, "threads of that runtime")
    fingerprint: str | None = option(
        None, "key of the rows to use, if --table holds several (smcp-table show)"
    )
    fraction: float = option(
        1.0, "share of the recipe's epochs to run, schedule and learning rates with them"
    )
    out: str = option("runs/recipe", "folder for the files")
    resume: bool = option(False, "go on with the run in --out, if there is one")
    seed: int = option(0, "seed of everything random")
    workers: int = option(4, "processes a rank that read images")
    device: str = option("auto", "where to train", ("auto", "cpu", "cuda"))
    ranks: int | None = option(None, "plan a dry run for this many ranks; a real run uses torchrun's")
    dry_run: bool = option(False, "print the whole plan and train nothing")

    def __post_init__(self) -> None:
        if self.threads < 1 or self.workers < 0:
            raise InputError("--threads must be at least 1, --workers at least 0")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed must be from 0 to {2**32 - 1}, not {self.seed}")
        if not self.out.strip():
            raise InputError("--out is empty: give a folder")
        if not 0 < self.fraction <= 1:
            raise InputError(f"--fraction must be in (0, 1], not {self.fraction}")
        if self.ranks is not None and (self.ranks < 1 or not self.dry_run):
            raise InputError(
                "--ranks must be at least 1, and is for --dry-run: torchrun starts the ranks of a run"
            )

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.out)
