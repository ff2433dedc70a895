"""One run of a recipe: plan, train and prune, convert, evaluate, measure, record."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rich.console import Console
from torch import Tensor, nn

from smcp_fx.backends import Backend, measure_interleaved
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.latency.cost import LatencyCost, latency_of
from smcp_fx.prepare import convert, converted_full, prepare
from smcp_fx.prepared import PreparedModel
from smcp_fx.pruning import ranks
from smcp_fx.recipes.classification import Classification
from smcp_fx.recipes.plan import print_dense_plan, print_plan
from smcp_fx.recipes.pricing import recipe_cost, runtime_here
from smcp_fx.recipes.processes import joined_ranks, world
from smcp_fx.recipes.recipe import Recipe, load_recipe
from smcp_fx.recipes.record import Record, figures_of, write_record
from smcp_fx.recipes.settings import RunSettings
from smcp_fx.recipes.task import Task, torchmetrics
from smcp_fx.recipes.timeline import Timeline
from smcp_fx.recipes.training import Batches, batch_norm_parameters, evaluate, training_loop
from smcp_fx.recipes.weights import check_given, starting_network
from smcp_fx.report.formats import milliseconds, percent
from smcp_fx.serialization.saving import save
from smcp_fx.storage.files import locked, read_json, write_texts
from smcp_fx.storage.tensor_file import write_together
from smcp_fx.training import Epoch, TrainingLoop

#: Settings that may change between a run and its resumption.
_FREE = {"resume", "out", "workers", "dry_run", "ranks", "data"}
#: Held while a run works in its folder.
_LOCK = "lock"
#: Classes of the data sets of the paper, for a plan without data.
_CLASSES = {"classification": 1000, "detection": 21}


def run_recipe(
    name: str, settings: RunSettings, overrides: Sequence[str] = (), console: Console | None = None
) -> Record | None:
    """Run a recipe and return the record that was written to ``settings.out``; None after a dry run.

    ``overrides`` change fields of the recipe ("training.batch=32"). Under torchrun every rank calls this;
    rank 0 writes and prints. Raises the library's errors for anything that does not fit, before training if
    possible.
    """
    with joined_ranks(settings.device) as device:
        shown = console or Console()
        quiet = Console(quiet=True)
        run = _Training(name, settings, tuple(overrides), device, shown if ranks.rank() == 0 else quiet)
        if settings.dry_run:
            run.plan()
            return None
        return run.go()


class _Training:
    def __init__(
        self,
        name: str,
        settings: RunSettings,
        overrides: tuple[str, ...],
        device: torch.device,
        console: Console,
    ) -> None:
        self.recipe = load_recipe(name, overrides)
        self.settings = settings
        self.dense = settings.dense or self.recipe.pruning.target == 1
        self.overrides = overrides
        self.device = device
        self.console = console
        self.ranks = settings.ranks or world()
        self.cost: str | LatencyCost = "params"  # of a dense run, which has no target
        self.runtime: Backend | None = None  # times the resulting networks

    def plan(self) -> None:
        """Print the plan of the run."""
        settings, recipe = self.settings, self.recipe
        if not self.dense:
            self.cost = recipe_cost(recipe, settings, world())
        images, classes = recipe.images, _CLASSES[recipe.task]
        if settings.data is not None:
            task = _load_task(recipe, Path(settings.data))
            images, classes = len(task.train), task.classes  # type: ignore[arg-type]
        timeline = Timeline.of(recipe, images, self.ranks, settings.fraction)
        if self.dense:
            print_dense_plan(timeline, self.console)
            return
        prepared = self._prepared(starting_network(recipe, classes, "none", dense=True), timeline)
        print_plan(prepared, timeline, self.cost, self.console)

    def go(self) -> Record:
        """Run, and keep other runs out of the folder."""
        with ExitStack() as self.held:
            return self._go()

    def _go(self) -> Record:
        settings, recipe = self.settings, self.recipe
        began = time.monotonic()
        if settings.data is None:
            raise InputError(
                "a run needs --data, the folder of the images; --dry-run prints the plan without"
            )
        torchmetrics()
        check_given(recipe, settings.weights, self.dense)
        if not self.dense:
            self.cost = recipe_cost(recipe, settings, self.ranks)
        self.runtime = runtime_here(settings) if ranks.rank() == 0 else None
        task = _load_task(recipe, Path(settings.data))
        timeline = Timeline.of(recipe, len(task.train), self.ranks, settings.fraction)  # type: ignore[arg-type]
        self._open_folder()
        torch.manual_seed(settings.seed)
        network = starting_network(recipe, task.classes, settings.weights, self.dense)
        norms = batch_norm_parameters(network)
        trained = self._placed(network)
        if not self.dense:
            trained = self._prepared(trained, timeline)
            assert isinstance(trained, PreparedModel)
            print_plan(trained, timeline, self.cost, self.console)
        else:
            print_dense_plan(timeline, self.console)
        batches = Batches(task, timeline, settings.seed, settings.workers, self.device.type == "cuda")
        checkpoint = settings.folder / "checkpoint.safetensors"
        loop = training_loop(trained, batches, timeline, self.device, checkpoint, settings.seed, norms)
        dense = self._start(loop, batches)
        loop.run(finished=self._tell)
        values, measured = self._finish(trained, batches)
        record = self._record(trained, timeline, values, {**dense, **measured}, time.monotonic() - began)
        if ranks.rank() == 0:
            write_record(record, settings.folder / "record.json")
            self._summary(record)
        return record

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False)

    # ---- before training --------------------------------------------------------------------------------

    def _open_folder(self) -> None:
        """Make --out, or check the run in it to resume."""
        if ranks.rank():
            return
        folder = self.settings.folder
        file, record = folder / "settings.json", self._asked()
        if file.exists():
            self.held.enter_context(locked(folder / _LOCK, f"another run works in {folder}"))
        if file.exists():
            if not self.settings.resume:
                raise CheckpointError(
                    f"{folder} holds a run: continue it with --resume, or give another --out"
                )
            advice = "give another --out and start afresh"
            before = read_json(file, CheckpointError, advice)
            if not isinstance(before, dict):
                raise CheckpointError(f"{file} is damaged: it holds no settings; {advice}")
            changed = [
                f"{key}: {before.get(key)!r} -> {record[key]!r}"
                for key in record
                if before.get(key) != record[key]
            ]
            if changed:
                raise CheckpointError(
                    f"the run in {folder} was started with other settings ({'; '.join(changed)[:600]}); resume it "
                    "with the same, or give another --out"
                )
            return
        write_texts({file: json.dumps(record, indent=1)}, "the run's settings")
        self.held.enter_context(locked(folder / _LOCK, f"another run works in {folder}"))

    def _asked(self) -> dict[str, Any]:
        chosen = {
            f.name: getattr(self.settings, f.name) for f in fields(self.settings) if f.name not in _FREE
        }
        asked: dict[str, Any] = json.loads(json.dumps({**chosen, "recipe": asdict(self.recipe)}))
        return asked

    def _placed(self, network: nn.Module) -> nn.Module:
        """Return the network on its device, with the layout and the batch norms that suit training there."""
        training = self.recipe.training
        network = network.to(self.device)
        if self.device.type != "cuda":
            return network
        torch.backends.cudnn.benchmark = True
        if training.sync_batch_norm and self.ranks > 1:
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        if training.mixed_precision:
            network = network.to(memory_format=torch.channels_last)
        return network

    def _prepared(self, network: nn.Module, timeline: Timeline) -> PreparedModel:
        return prepare(
            network,
            self._images(network),
            target=self.recipe.pruning.target,
            cost=self.cost,
            schedule=timeline.schedule,
            config=self.recipe.method,
        )

    def _images(self, network: nn.Module) -> Tensor:
        """Return example images: a batch of the latency's size, otherwise two."""
        batch = self.recipe.latency.batch if isinstance(self.cost, LatencyCost) else 2
        where = next(network.parameters()).device
        return torch.randn(batch, 3, self.recipe.size, self.recipe.size, device=where)

    def _start(self, loop: TrainingLoop, batches: Batches) -> dict[str, float]:
        """Resume from the checkpoint, if there is one; return the unpruned network's figures."""
        file = self.settings.folder / "dense.json"
        if self.settings.resume and loop.load():
            self._say(f"Continuing after step {loop.step} of {loop.total_steps}.")
            return figures_of(file) if file.exists() else {}
        if self.dense or self.settings.weights == "none":
            return {}
        values = evaluate(loop.network, batches, self.device)
        self._say(f"The unpruned network: {_listed(values)}")
        if ranks.rank() == 0:
            write_texts({file: json.dumps(values)}, "the unpruned network's accuracy")
        return values

    # ---- while training ---------------------------------------------------------------------------------

    def _tell(self, result: Epoch) -> None:
        parts = [f"epoch {result.epoch}", f"loss {result.loss:.4g}", f"rate {result.rate:.3g}"]
        self._say(", ".join([*parts, *([_listed(result.values)] if result.values else []),
                                      f"{result.seconds:.0f} s"]))  # fmt: skip

    # ---- after training ---------------------------------------------------------------------------------

    def _finish(self, trained: nn.Module, batches: Batches) -> tuple[dict[str, float], dict[str, float]]:
        """Write the resulting network; return its figures and the unpruned network's."""
        folder = self.settings.folder
        if not isinstance(trained, PreparedModel):
            values = evaluate(trained, batches, self.device)
            if ranks.rank() == 0:
                state = {key: value.cpu().contiguous() for key, value in trained.state_dict().items()}
                write_together({folder / "dense.safetensors": safetensors.torch.save(state)})
                self._measure({"dense": (trained, values)})
            return values, {}
        smaller: nn.Module = convert(trained)
        values = evaluate(smaller, batches, self.device)
        flops, counts = trained.plan.flops, trained.pruner.counts
        values["flops"] = flops.cost(counts)
        dense = {"flops": flops.cost(flops.full_counts)}
        latency = latency_of(trained.plan.cost)
        if latency is not None:
            values["predicted_ms"] = latency.latency(counts)
            dense["predicted_ms"] = latency.latency(latency.full_counts)
        if ranks.rank() == 0:
            smaller = _plain(smaller)
            about = {"recipe": self.recipe.name, "target": self.recipe.pruning.target, "kept": counts}
            save(smaller, folder / "pruned.safetensors", metadata=about)
            self._measure({"dense": (converted_full(trained), dense), "pruned": (smaller, values)})
        return values, dense

    def _measure(self, networks: dict[str, tuple[nn.Module, dict[str, float]]]) -> None:
        """Emit the networks, time them in turns, and add latencies to their figures; only with a runtime."""
        if self.runtime is None:
            return
        batch, size = self.recipe.latency.batch, self.recipe.size
        with ExitStack() as stack:
            engines = [
                stack.enter_context(
                    self.runtime.compile(
                        _plain(network),
                        (torch.randn(batch, 3, size, size),),
                        self.settings.folder / f"{name}.onnx",
                    )
                )
                for name, (network, _) in networks.items()
            ]
            latencies = measure_interleaved(engines)
        for (_, figures), one in zip(networks.values(), latencies, strict=True):
            figures["latency_ms"] = one.median_ms
            figures["fps"] = 1000 * batch / one.median_ms

    def _record(
        self,
        trained: nn.Module,
        timeline: Timeline,
        values: dict[str, float],
        dense: dict[str, float],
        seconds: float,
    ) -> Record:
        settings, recipe = self.settings, self.recipe
        history = trained.pruner.history if isinstance(trained, PreparedModel) else []
        whole = settings.fraction == 1 and not self.overrides and settings.weights != "none"
        return Record.of_run(
            row=self._row(),
            complete=whole and bool(recipe.row) and (self.dense or settings.cost == "latency"),
            values=values,
            dense=dense,
            recipe=asdict(recipe),
            overrides=self.overrides,
            fraction=settings.fraction,
            cost="none" if self.dense else settings.cost,
            weights=settings.weights or (recipe.dense_weights if self.dense else recipe.weights),
            ranks=self.ranks,
            total_batch=timeline.total_batch,
            device=self._device(),
            solves=tuple(
                {"step": s.step, "target": s.target, "cost": s.cost, "importance_kept": s.importance_kept}
                for s in history
            ),
            seconds=seconds,
        )

    def _device(self) -> str:
        """Return a description of the device of the latencies."""
        if isinstance(self.cost, LatencyCost):
            return self.cost.fingerprint.describe()
        return self.runtime.fingerprint().describe() if self.runtime is not None else ""

    def _row(self) -> str:
        row = self.recipe.row
        return (
            row
            if not self.dense or self.recipe.pruning.target == 1
            else f"{row.partition('/')[0]}/No pruning"
        )

    def _summary(self, record: Record) -> None:
        folder, values, dense = self.settings.folder, record.values, record.dense
        self._say(f"Reached      {_listed(values)}")
        if "flops" in values:
            self._say(f"FLOPs        {percent(values['flops'] / dense['flops'])} of the unpruned network's")
        if "predicted_ms" in values:
            share = values["predicted_ms"] / dense["predicted_ms"]
            text = f"{milliseconds(values['predicted_ms'])} by the table, {percent(share)} of the unpruned network's"
            if "latency_ms" in values:
                share = values["latency_ms"] / dense["latency_ms"]
                text += f"; measured {milliseconds(values['latency_ms'])}, {percent(share)}"
            self._say(f"Latency      {text}")
        written = sorted(path.name for path in folder.iterdir() if path.name != _LOCK)
        self._say(f"Files in {folder}: {', '.join(written)}")


def _plain(network: nn.Module) -> nn.Module:
    """Return the network in eval mode, on the CPU and in the layout that backends take."""
    return network.cpu().to(memory_format=torch.contiguous_format).eval()


def _listed(values: dict[str, float]) -> str:
    """Return percentages by name, as text."""
    return (
        ", ".join(f"{name} {value:.2f}%" for name, value in values.items() if name in ("top1", "top5", "mAP"))
        or "nothing evaluated"
    )


def _load_task(recipe: Recipe, data: Path) -> Task:
    """Open a recipe's data under ``data``; `InputError` if its files are missing or do not fit."""
    if recipe.task == "detection":
        from smcp_fx.recipes.detection import Detection

        return Detection(recipe, data)
    return Classification(recipe, data)
