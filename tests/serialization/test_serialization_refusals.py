"""What cannot be saved, and files that do not load: each is refused with a reason."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from saved_models import (
    SharedModules,
    edit_manifest,
    small_model,
)
from torch import Tensor, fx, nn

import smcp_fx
from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.serialization.saving import load, save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(small_model(), tmp_path / "model.safetensors")


# ---- what cannot be saved -------------------------------------------------------------------------------------


@fx.wrap
def user_function(x: Tensor) -> Tensor:
    return x + 1


class UserBlock(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return user_function(x)


def test_a_users_function_is_refused_with_its_node_and_module(tmp_path: Path) -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), UserBlock())))
    with pytest.raises(CheckpointError, match=r"node 'user_function' \(in module '1\.1'\).*user_function"):
        save(traced, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


@dataclasses.dataclass
class Batch:
    image: Tensor


class OfABatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.out(self.stem(batch.image).relu())  # type: ignore[no-any-return]


def test_an_input_of_a_users_class_is_refused_with_what_to_do(tmp_path: Path) -> None:
    prepared = smcp_fx.prepare(OfABatch(), (Batch(torch.randn(2, 3, 8, 8)),))
    with pytest.raises(
        CheckpointError, match=r"attribute 'image'.*let forward take tensors, tuples or dicts"
    ):
        save(smcp_fx.convert(prepared), tmp_path / "model.safetensors")


def _hooked(module: fx.GraphModule) -> None:
    module.stem.register_forward_hook(lambda *_: None)


def _parametrised(module: fx.GraphModule) -> None:
    nn.utils.parametrizations.weight_norm(module.stem)


def _users_class(module: fx.GraphModule) -> None:
    module.stem = UserBlock()


def _sparse_weight(module: fx.GraphModule) -> None:
    module.stem.weight = nn.Parameter(torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_hooked, "module 'stem'.*has hooks"),
        (_parametrised, "module 'stem'.*remove_parametrizations"),
        (_users_class, "module 'stem'.*UserBlock"),
        (_sparse_weight, r"module 'stem'.*'stem\.weight'.*sparse"),
    ],
)
def test_modules_a_file_cannot_hold_are_refused(
    small: fx.GraphModule, tmp_path: Path, change: Callable[[fx.GraphModule], None], message: str
) -> None:
    module = copy.deepcopy(small)
    change(module)
    with pytest.raises(CheckpointError, match=message):
        save(module, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_input_errors(small: fx.GraphModule, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(InputError, match="safetensors"):
        save(small, tmp_path / "model.pt")
    with pytest.raises(InputError, match="Conv2d"):
        save(nn.Conv2d(1, 1, 1), path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="convert"):
        save(smcp_fx.prepare(SharedModules(), torch.randn(2, 3, 8, 8)), path)
    for metadata in ({"a": torch.ones(1)}, {"a": math.nan}, {"a": [[]] * 1000}):
        with pytest.raises(InputError, match="metadata"):
            save(small, path, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_the_earlier_files(
    small: fx.GraphModule, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = {file: file.read_bytes() for file in saved.parent.iterdir()}
    changed = copy.deepcopy(small)
    changed.stem.weight.data.zero_()
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"smcp_fx.storage.tensor_file.os.{function}", full_disk)
            with pytest.raises(CheckpointError, match="No space left"):
                save(changed, saved)
        assert {file: file.read_bytes() for file in saved.parent.iterdir()} == before


# ---- files that do not load -----------------------------------------------------------------------------------


def _remove_tensors(path: Path) -> None:
    path.unlink()


def _remove_manifest(path: Path) -> None:
    path.with_suffix(".json").unlink()


def _truncate_tensors(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _truncate_manifest(path: Path) -> None:
    text = path.with_suffix(".json").read_text()
    path.with_suffix(".json").write_text(text[: len(text) // 2])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _foreign_json(path: Path) -> None:
    path.with_suffix(".json").write_text('{"weight_map": {}}')


def _not_json(path: Path) -> None:
    path.with_suffix(".json").write_bytes(b"\x80\x02PK")


def _nested_too_deep(path: Path) -> None:
    path.with_suffix(".json").write_text("[" * 100_000)


def _made_of_empty_lists(path: Path) -> None:
    path.with_suffix(".json").write_text("[" + "[]," * 100_000 + "[]]")


def _other_version(path: Path) -> None:
    edit_manifest(path, lambda manifest: manifest.update(version=1))


def _foreign_tensors_of_the_right_hash(path: Path) -> None:
    safetensors.torch.save_file({"other": torch.ones(3)}, path)
    content = path.read_bytes()
    digest = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    edit_manifest(path, lambda manifest: manifest.update(tensor_file=digest))


def _no_safetensors(path: Path) -> None:
    path.write_bytes(b"hello")
    digest = {"sha256": hashlib.sha256(b"hello").hexdigest(), "bytes": 5}
    edit_manifest(path, lambda manifest: manifest.update(tensor_file=digest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_tensors, "no model file .*keep both"),
        (_remove_manifest, "no manifest file .*keep both"),
        (_truncate_tensors, "is cut off: .*again"),
        (_truncate_manifest, "is damaged .*again"),
        (_flip_a_bit, "sha256 differs.*save again"),
        (_foreign_json, "not a manifest of smcp_fx.save"),
        (_not_json, "is damaged .*again"),
        (_nested_too_deep, "is damaged .*again"),
        (_made_of_empty_lists, "empty lists and objects.*again"),
        (_other_version, r"format version 1.*reads version 2.*torch "),
        (_foreign_tensors_of_the_right_hash, "holds other tensors"),
        (_no_safetensors, "is damaged .*again"),
    ],
)
def test_bad_files_are_one_clear_paragraph(saved: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(saved)
    assert str(saved.with_suffix("")) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mixed_up_pair_is_noticed(resnet: fx.GraphModule, saved: Path) -> None:
    other = save(resnet, saved.parent / "other.safetensors")
    saved.with_suffix(".json").write_bytes(other.with_suffix(".json").read_bytes())
    other.with_suffix(".json").unlink()
    with pytest.raises(CheckpointError, match=r"cut off|different saves"):
        load(saved)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a .*safetensors file"):
        load(tmp_path / "model.pt")


@pytest.mark.parametrize("key", ["graph", "modules", "tensors", "class", "tensor_file"])
@pytest.mark.parametrize("wrong", [None, 3, [], [{}], {"a": 1}], ids=repr)
def test_manifests_with_wrong_parts_are_checkpoint_errors(saved: Path, key: str, wrong: Any) -> None:
    edit_manifest(saved, lambda manifest: manifest.update({key: wrong}))
    with pytest.raises(CheckpointError):
        load(saved)
    edit_manifest(saved, lambda manifest: manifest.pop(key))
    with pytest.raises(CheckpointError):
        load(saved)


def test_every_manifest_with_one_line_missing_is_refused_or_whole(saved: Path) -> None:
    """No part of the graph, modules or tensors can be lost without an error or a changed model."""
    for key in ("graph", "modules", "tensors"):
        for index in range(len(json.loads(saved.with_suffix(".json").read_text())[key])):
            original = saved.with_suffix(".json").read_bytes()
            edit_manifest(saved, lambda manifest, key=key, index=index: manifest[key].pop(index))
            with pytest.raises(CheckpointError):
                load(saved)
            saved.with_suffix(".json").write_bytes(original)
