"""All checks of the sweep on one model, as a row of plain values."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Any

from comparison import difference, run, scale
from model_lists import Entry
from random_weights import CALM, calibrate, last_bits, random_masks, randomise
from try_onnx import check_onnx
from trying import FLOAT32, FLOAT64, converted, describe, peak, timed_stages


def attempt(entry: Entry, row: dict[str, Any], onnx: bool, strength: float | None = None) -> None:
    """Run all checks on a model in order, filling ``row``."""
    import torch

    import smcp_fx
    from smcp_fx.config import MethodConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = entry.build()
    randomise(model, strength)
    model.eval()
    inputs = fitting_inputs(entry, model)
    row.update(input=list(inputs[0].shape), parameters=sum(p.numel() for p in model.parameters()))
    before = peak()
    row["stage"] = "prepare"
    times = timed_stages()
    started = time.perf_counter()
    prepared = smcp_fx.prepare(model, inputs, config=MethodConfig(multiple=1, batch_norm_scaling=True))
    row.update(prepare_s=time.perf_counter() - started, trace_s=times["trace"], graph_s=times["build"])
    row.update(peak_gib=(peak() - before) / 2**20, nodes=len(prepared.graph.nodes))
    row.update(describe(prepared))
    row["stage"] = "identity"
    expected = run(model, inputs)
    row["identity"] = difference(run(prepared, inputs), expected)
    if not row["identity"] <= 1e-5:
        raise ArithmeticError(f"all channels kept, and the output differs by {row['identity']:.3g}")
    del model
    row["stage"] = "masked train"
    masks = random_masks(prepared)
    prepared.set_masks(masks)
    # With two images, batch norm turns each channel of a one-pixel map into a sign, which amplifies rounding.
    more = inputs[0].numel() <= 2 * 3 * 128**2
    many = (torch.randn(8, *inputs[0].shape[1:]), *entry.besides(8)) if more else inputs
    calibrate(prepared, many)
    row["stage"] = "masked eval"
    masked = run(prepared, inputs)
    sliced = converted(prepared, row)
    row["stage"] = "sliced eval"
    pair, fitting, bound = compare_sliced(prepared, sliced, inputs, masked, row, strength)
    row["stage"] = "another batch size"
    compare_batches(pair, fitting, bound, row)
    row["stage"] = "train"
    check_training(entry, sliced, inputs, strength)
    row["stage"] = "save and load"
    check_saving(entry, sliced, inputs, row)
    if onnx:
        row["stage"] = "ONNX"
        started = time.perf_counter()
        check_onnx(sliced, inputs, row, lambda: calm(entry, inputs, masks, many))
        row["onnx_s"] = time.perf_counter() - started
    row["status"] = "exact"
    del row["stage"]


def compare_sliced(
    prepared: Any,
    sliced: Any,
    inputs: tuple[Any, ...],
    masked: Any,
    row: dict[str, Any],
    strength: float | None,
) -> tuple[tuple[Any, Any], tuple[Any, ...], float]:
    """Compare sliced with ``masked`` outputs; in float64 if float32 differs.

    Returns the models (masked, sliced) and inputs of the deciding comparison, and its limit.
    """
    import torch
    from torch.utils import _pytree as pytree

    import smcp_fx

    row["error"] = difference(run(sliced, inputs), masked)
    spread = [
        float((t - t[:1]).abs().max())
        for t in pytree.tree_leaves(masked)
        if isinstance(t, torch.Tensor) and t.dim()
    ]
    row["spread"] = max(spread) / max(scale(masked), 1e-30)
    if row["error"] <= FLOAT32:
        return (prepared, sliced), inputs, FLOAT32
    row["stage"] = "float64"
    fitting = tuple(i.double() if i.is_floating_point() else i for i in inputs)
    wide = copy.deepcopy(prepared).double()
    pair = (wide, smcp_fx.convert(wide))
    row["error64"] = difference(run(pair[1], fitting), run(wide, fitting))
    if row["error64"] <= FLOAT64:
        return pair, fitting, FLOAT64
    # It is rounding if weights that differ in their last bit change the masked network's output as much.
    row["last_bit64"] = difference(run(last_bits(wide), fitting), run(wide, fitting))
    if strength is None or not row["error64"] <= row["last_bit64"]:
        raise ArithmeticError(
            f"masked and sliced differ by {row['error']:.3g}, float64 {row['error64']:.3g}; weights that "
            f"differ in their last bit change the output by {row['last_bit64']:.3g}"
        )
    return pair, fitting, row["last_bit64"]


def compare_batches(
    pair: tuple[Any, Any], inputs: tuple[Any, ...], bound: float, row: dict[str, Any]
) -> None:
    """Compare the sliced model with the masked one on a batch of three."""
    import torch

    three = tuple(torch.cat([i, i[:1]]) for i in inputs)
    try:
        masked = run(pair[0], three)
    except Exception as error:  # the model, or its trace, works for one batch size only
        row["batch"] = f"{type(error).__name__}: {str(error)[:200]}"
        return
    row["batch"] = difference(run(pair[1], three), masked)
    if not row["batch"] <= 10 * bound:
        raise ArithmeticError(f"with a batch of 3, masked and sliced differ by {row['batch']:.3g}")


def check_training(entry: Entry, sliced: Any, inputs: tuple[Any, ...], strength: float | None) -> None:
    """Check that a backward pass in train mode gives finite gradients, if it does in the dense model."""
    bad = gradients_not_finite(sliced, inputs)
    if bad:  # a colour transform of negative values, say
        dense = entry.build()
        randomise(dense, strength)
        if not gradients_not_finite(dense, inputs):
            raise ArithmeticError(f"gradients that are not finite: {bad[:3]}")


def gradients_not_finite(model: Any, inputs: tuple[Any, ...]) -> list[str]:
    """The parameters whose gradients are not finite in train mode; leaves the model in eval mode."""
    import torch
    from torch.utils import _pytree as pytree

    model.train()
    outputs = [t for t in pytree.tree_leaves(model(*inputs)) if isinstance(t, torch.Tensor)]
    sum(t.double().square().mean() for t in outputs).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    model.eval()
    return [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]


def check_saving(entry: Entry, sliced: Any, inputs: tuple[Any, ...], row: dict[str, Any]) -> None:
    """Check that a saved and loaded model gives the same outputs, and note whether its own class does.

    What `save` refuses is noted.
    """
    import torch

    import smcp_fx
    from smcp_fx.errors import CheckpointError
    from smcp_fx.serialization.saving import applied_classes

    with tempfile.TemporaryDirectory() as folder:
        outputs = run(sliced, inputs)
        try:
            path = smcp_fx.save(sliced, Path(folder) / "model.safetensors")
        except CheckpointError as error:
            row["not_saved"] = str(error)[:300]
            return
        row["regions"] = not isinstance(sliced, torch.fx.GraphModule)
        into = {"into": entry.build()} if row["regions"] else {}
        loaded = smcp_fx.load(path, functions=applied_classes(sliced), **into)
        row["reload"] = difference(run(loaded, inputs), outputs)
        if row["reload"] != 0:
            raise ArithmeticError(f"after loading, the output differs by {row['reload']:.3g}")
        row["stage"] = "own class"
        row["own_class"] = own_class(entry.build(), sliced, inputs)


def own_class(fresh: Any, sliced: Any, inputs: tuple[Any, ...]) -> str:
    """Return why the model's class fails at the sliced widths, or "" if it computes the same."""
    import smcp_fx

    try:
        smcp_fx.resize(fresh, sliced, inputs)
    except smcp_fx.SmcpError as error:
        return str(error)[:400]
    return ""


def fitting_inputs(entry: Entry, model: Any) -> tuple[Any, ...]:
    """Return inputs of the first of the entry's shapes that the model takes in eval mode."""
    import torch

    errors = []
    for shape in entry.shapes(model):
        inputs = (torch.randn(shape), *entry.besides(shape[0]))
        try:
            run(model, inputs)
            for module in model.modules():  # a map of one pixel has no statistics
                module.training = True
            run(model, inputs)
            model.eval()
        except Exception as error:
            model.eval()
            errors.append(f"{shape}: {error}")
        else:
            return inputs
    raise RuntimeError("; ".join(errors)[:600])


def calm(entry: Entry, inputs: tuple[Any, ...], masks: dict[str, Any], many: tuple[Any, ...]) -> Any:
    """Return the entry's sliced model with batch norms of `CALM` strength."""
    import smcp_fx
    from smcp_fx.config import MethodConfig

    model = entry.build()
    randomise(model, CALM)
    config = MethodConfig(multiple=1, batch_norm_scaling=True)
    prepared = smcp_fx.prepare(model.eval(), inputs, config=config)
    prepared.set_masks(masks)
    calibrate(prepared, many)
    return smcp_fx.convert(prepared).eval()
