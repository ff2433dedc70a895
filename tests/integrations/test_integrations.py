"""Pruning in Lightning and Accelerate: schedules, precision, accumulation, checkpoints."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as lightning
import pytest
import torch
from models import Residual, randomise
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import TrainingError

ROOT = Path(__file__).parents[2]
pytestmark = [  # Lightning's own: of torch's pytree, of the cores of the machine, of the folder of a resumed run
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 8, 8, generator=generator)
    return torch.utils.data.TensorDataset(images, torch.randint(5, (32,), generator=generator))


# ---- Lightning ---------------------------------------------------------------------------------------------


def lightning_module(schedule: smcp_fx.Schedule, wrong: bool = False) -> Any:

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            model = randomise(Residual(16, 24))
            config = MethodConfig(multiple=2, batch_norm_scaling=True)
            image = torch.randn(2, 3, 8, 8)
            self.model = smcp_fx.prepare(model, image, schedule=schedule, config=config)
            self.original = [nn.Parameter(torch.ones(2))] if wrong else None

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.original or self.parameters(), lr=0.01, momentum=0.9)

    return Module()


def fit(module: Any, folder: Path, epochs: int, resume: Path | None = None, **options: Any) -> Any:
    from smcp_fx.integrations.lightning import PruningCallback

    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[PruningCallback()],
        logger=lightning.loggers.CSVLogger(folder),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    loader = torch.utils.data.DataLoader(dataset(), 4)
    trainer.fit(module, loader, ckpt_path=resume)
    return trainer


SCHEDULE = smcp_fx.Schedule(epochs=2, steps_per_epoch=8, warmup=0.5, ramp=0.5, cooldown=0.5, every=2)
SOLVES = [6, 8, 10, 12]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(precision: str, tmp_path: Path) -> None:
    module = lightning_module(SCHEDULE)
    fit(module, tmp_path, 2, precision=precision, gradient_clip_val=1.0)
    pruner = module.model.pruner
    assert [solve.step for solve in pruner.history] == SOLVES
    assert int(module.model.smcp.steps) == 16
    assert pruner.cost.cost(pruner.counts) <= pruner.target
    (metrics,) = tmp_path.rglob("metrics.csv")
    logged = [row for row in csv.DictReader(metrics.read_text().splitlines()) if row.get("pruning/cost")]
    assert [float(row["pruning/cost"]) for row in logged] == pytest.approx([s.cost for s in pruner.history])


def test_lightning_accumulates(tmp_path: Path) -> None:
    """Two batches an optimiser step: the schedule counts optimiser steps."""
    module = lightning_module(SCHEDULE)
    fit(module, tmp_path, 4, accumulate_grad_batches=2)
    assert [solve.step for solve in module.model.pruner.history] == SOLVES
    assert int(module.model.smcp.steps) == 16


def test_lightning_resumes(tmp_path: Path) -> None:
    """From its own checkpoint: masks, importances and history of an uninterrupted run."""
    whole = lightning_module(SCHEDULE)
    fit(whole, tmp_path / "whole", 2)
    first = lightning_module(SCHEDULE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", smcp_fx.TrainingWarning)  # one epoch of two
        trainer = fit(first, tmp_path / "first", 1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    second = lightning_module(SCHEDULE)
    fit(second, tmp_path / "second", 2, resume=tmp_path / "saved.ckpt")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name
    assert [s.masks for s in second.model.pruner.history] == [s.masks for s in whole.model.pruner.history]


@pytest.mark.parametrize("swapped", [False, True])
def test_lightning_with_two_optimisers(swapped: bool, tmp_path: Path) -> None:
    """Both hold prepared parameters, stepped by hand one after the other: one step of the schedule."""
    module = lightning_module(SCHEDULE)
    module.automatic_optimization = False
    kernels = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() < 2]
    optimizers = [torch.optim.SGD(kernels, lr=0.01), torch.optim.AdamW(others)]
    module.configure_optimizers = lambda: optimizers[::-1] if swapped else optimizers

    def training_step(batch: Any, batch_idx: int) -> None:
        for optimizer in module.optimizers():
            optimizer.zero_grad()
        module.manual_backward(nn.functional.cross_entropy(module.model(batch[0]), batch[1]))
        for optimizer in module.optimizers():
            optimizer.step()

    module.training_step = training_step
    fit(module, tmp_path, 2)
    assert [solve.step for solve in module.model.pruner.history] == SOLVES
    assert int(module.model.smcp.steps) == 16


def test_without_lightning_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "smcp_fx.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match="pip install lightning"):
        importlib.import_module("smcp_fx.integrations.lightning")


def test_lightning_explains_mistakes(tmp_path: Path) -> None:
    with pytest.warns(smcp_fx.TrainingWarning, match="last masks at step 12, and the trainer makes 8"):
        fit(lightning_module(SCHEDULE), tmp_path, 1)
    with pytest.raises(TrainingError, match="no optimiser holds a parameter of the prepared model"):
        fit(lightning_module(SCHEDULE, wrong=True), tmp_path, 2)

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: Any, index: int) -> None:
            return None

    with pytest.raises(TrainingError, match="one prepared model in Plain, which holds 0"):
        fit(Plain(), tmp_path, 1)


# ---- Accelerate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_accelerate_example(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "accelerate_training.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is one a process
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    prepared, smaller = example.main(accelerator)
    pruner = prepared.pruner
    assert int(prepared.smcp.steps) == 4 * 8 == pruner.schedule.total_steps
    assert pruner.cost.cost(pruner.counts) <= pruner.target == 0.5 * pruner.full_cost
    assert importlib.import_module("toy").accuracy(smaller) > 0.9
