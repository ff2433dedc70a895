"""Pruning in ultralytics' trainer: a stand-in has the parts of its models and trainers that the integration meets."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tolerances import assert_close
from torch import Tensor, nn

from smcp_fx.errors import InputError
from smcp_fx.integrations.ultralytics import PrunedYolo, PruningTrainer
from smcp_fx.prepared import PreparedModel


class Head(nn.Module):
    """Boxes from two maps, with anchors for one size; `flow` serves the loss alone."""

    shape, anchors, export = None, torch.empty(0), False

    def __init__(self) -> None:
        super().__init__()
        self.cv2 = nn.ModuleList(nn.Conv2d(width, 4, 1) for width in (16, 32))
        self.flow, self.stride = nn.Linear(2, 2), torch.tensor([1.0, 2.0])

    def forward(self, maps: list[Tensor]) -> Any:
        boxes = [layer(x).flatten(2) for layer, x in zip(self.cv2, maps, strict=True)]
        raw = {"boxes": torch.cat(boxes, 2), "feats": maps}
        if self.training:
            return raw
        if self.shape != maps[0].shape:
            self.shape, self.anchors = maps[0].shape, torch.arange(raw["boxes"].shape[2])
        found = raw["boxes"] + self.anchors
        return found if self.export else (found, raw)


class Yolo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1), Head())
        self.yaml = {"channels": 3, "backbone": []}
        self.names, self.args = {0: "square"}, SimpleNamespace(box=2.0)

    def forward(self, x: Any) -> Any:
        if isinstance(x, dict):
            return self.loss(x)
        near = self.model[0](x).relu()
        return self.model[2]([near, self.model[1](near).relu()])

    def loss(self, batch: dict[str, Any]) -> Tensor:
        if getattr(self, "criterion", None) is None:
            self.criterion = self.init_criterion()
        return self.criterion(self(batch["img"]), batch)

    def init_criterion(self) -> Any:
        head, settings = self.model[-1], self.args
        return lambda raw, batch: (
            settings.box * (raw["boxes"].mean() - head.flow(batch["points"]).mean() * head.stride[0]) ** 2
            + 0 * raw["feats"][0].shape[2]
        )


class LibrarysTrainer:
    """Averages its model, and steps as ultralytics' trainer does."""

    def __init__(self, weights: nn.Module | None = None) -> None:
        self.args, self.epochs, self.accumulate, self.train_loader = SimpleNamespace(imgsz=16), 6, 1, range(6)
        self.scaler = torch.amp.GradScaler(enabled=False)
        self.model = self.get_model(weights=weights)
        self.ema = SimpleNamespace(ema=copy.deepcopy(self.model).eval())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
        return Yolo()

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for mine, theirs in zip(self.ema.ema.parameters(), self.model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.5)

    def train(self) -> None:
        for _ in range(self.epochs * len(self.train_loader)):
            batch = {"img": torch.randn(2, 3, 16, 16), "points": torch.randn(2, 2)}
            self.model.train()(batch).backward()
            self.optimizer_step()


class Trainer(PruningTrainer, LibrarysTrainer):
    target = 0.4
    options: ClassVar[dict[str, Any]] = {"check": False}


def test_a_run_of_the_trainer_leaves_a_smaller_model_in_its_files() -> None:
    torch.manual_seed(0)
    trainer = Trainer()
    names = set(trainer.model.state_dict())
    assert names == set(trainer.ema.ema.state_dict())
    trainer.train()
    network, averaged = trainer.model.network, trainer.ema.ema.network
    assert network.pruner.history[-1].cost <= 0.4 * network.plan.cost.cost(network.plan.cost.full_counts)
    assert all(torch.equal(mask, averaged.masks[name]) for name, mask in network.masks.items())
    saved = pickle.loads(pickle.dumps(copy.deepcopy(trainer.ema.ema)))
    assert not isinstance(saved.network, PreparedModel) and saved.names == {0: "square"}
    assert sum(p.numel() for p in saved.parameters()) < sum(p.numel() for p in Yolo().parameters())
    for size in (16, 24):
        images = torch.randn(1, 3, size, size)
        expected = trainer.ema.ema(images)
        assert_close(saved(images), expected, "slicing", str(size))
        saved.model[-1].export = True
        assert_close(saved(images), expected[0], "slicing", "exported")
        saved.model[-1].export = False
    with pytest.raises(InputError, match=r"train\(trainer=\.\.\.\)"):
        copy.deepcopy(saved.yaml)["backbone"]  # what the library's own trainer builds from
    again = Trainer(saved)
    again.train()
    assert again.model is saved


class Classifier(nn.Module):
    """Has no settings; the library's trainer asks its head for the number of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), Classes()
        )
        self.yaml = {"channels": 3}

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def init_criterion(self) -> Any:
        return nn.functional.cross_entropy


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_classifier_has_no_settings_and_is_asked_for_its_classes() -> None:
    pruned = PrunedYolo.prepare(Classifier(), 16)
    head = pruned.model[-1].linear
    assert head.out_features == 5 and not list(head.parameters()) and not list(pruned.model.parameters())
    assert pruned.init_criterion() is nn.functional.cross_entropy


def test_the_loss_and_what_it_asks_for_are_the_librarys() -> None:
    yolo = Yolo()
    pruned = PrunedYolo.prepare(yolo, 16)
    assert pruned.network.channels.free_share > 0.9  # but one channel of each map
    batch = {"img": torch.randn(2, 3, 16, 16), "points": torch.randn(2, 2)}
    pruned.args = {"box": 2.0}  # outside of a trainer
    assert_close(pruned.train()(batch), yolo.train()(batch), "identity", "loss")
    assert pruned.args == {"box": 2.0} and not hasattr(pruned.convert(), "criterion")
    assert {name.split(".")[0] for name, _ in pruned.named_parameters()} == {"network", "model"}
    assert pruned.fuse() is pruned and pruned.is_fused() and pruned.convert().convert().fuse()
    assert pruned.double().model[0].stride.dtype == torch.float64
    with pytest.raises(AttributeError):
        _ = pruned.nothing
    with pytest.raises(InputError, match=r"YOLO\(\.\.\.\)\.model"):
        PrunedYolo.prepare(nn.Conv2d(3, 4, 1))
