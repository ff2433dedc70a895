"""PyTorch module to ONNX file, checked against the module in ONNX Runtime before the file gets its name.

`torch.onnx.export(dynamo=True)` translates the module and folds batch norms into convolutions; `clean_model`
removes the exporter's leftovers; `lower_opset` converts the file to an opset older than the exporter's own.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from smcp_fx.backends.checking import compare_with_module, eval_mode
from smcp_fx.backends.onnx.attention import FourDimensionalAttention
from smcp_fx.backends.onnx.axes import (
    Axes,
    GivenAxes,
    batch_axes,
    given_axes,
    image_axes,
    other_sizes,
    resized,
)
from smcp_fx.backends.onnx.clean import clean_model
from smcp_fx.backends.onnx.naming import name_axes, name_values, rename_weights
from smcp_fx.backends.onnx.opset import lower_opset
from smcp_fx.backends.onnx.recurrent import TRANSLATIONS, WholeRecurrentLayers, fold_weights
from smcp_fx.backends.onnx.refusals import explain
from smcp_fx.errors import BackendError, InputError, SmcpError, first_line
from smcp_fx.interface.positional import flattened, returning_tensors
from smcp_fx.interface.wrapping import is_prepared, require_whole, unwrapped
from smcp_fx.storage.files import check_replaceable
from smcp_fx.tracing.modes import left_out
from smcp_fx.tracing.names import any_names

DEFAULT_OPSET = 20
OLDEST_OPSET = 17
#: The exporter's own opset; `lower_opset` converts to older ones.
_EXPORTER_OPSET = 18


def export_onnx(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    path: Path | str,
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
    dynamic_axes: GivenAxes | None = None,
    precision: Literal["fp32", "fp16"] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Path:
    """Write ``model`` in eval mode as an ONNX file and return its path.

    ``example_inputs``: as for `prepare`. Each tensor in a list, tuple or dict becomes an input of the file,
    named by the argument and its place or key (``pair_0``, ``batch_left``); inputs given by name keep it.

    `smcp_fx.export_onnx` documents which axes stay open. ``precision`` writes weights, inputs and outputs in
    that type instead of the module's own. ``input_names`` and ``output_names`` replace the default names.
    ``metadata`` goes into the file, values other than strings as JSON. ``check`` runs the file in ONNX
    Runtime on random inputs, of the examples' shapes and of others, and compares its outputs with the
    module's. The file gets its name only after that: a failure leaves nothing behind.

    Errors: `BackendError` for an operation ONNX cannot express (named with its module), for outputs that
    differ, and for a full disk; `InputError` for an unusable opset or example inputs, and for a model that is
    prepared but not converted yet.
    """
    path = Path(path)
    if not isinstance(model, nn.Module):
        raise InputError(f"export_onnx needs an nn.Module, not {type(model).__name__}")
    model = unwrapped(model)
    require_whole(model, "export_onnx")
    if is_prepared(model):
        raise InputError(
            "the model is prepared, not converted: its file would be as large as the unpruned network's. "
            "Export what smcp_fx.convert(prepared) returns."
        )
    try:
        check_replaceable(path)
    except OSError as error:
        raise BackendError(f"cannot write {path}: {error.strerror}") from error
    model, inputs, own_names = flattened(model, example_inputs)
    names = own_names if input_names is None else input_names
    with eval_mode(model):
        model, fields = returning_tensors(model, inputs)
    output_names = fields if output_names is None else output_names
    if precision is not None:
        model, inputs = in_precision(model, inputs, precision)

    def finish(proto: onnx.ModelProto) -> None:
        name_values(proto, names, output_names)
        for key, value in {"producer": "smcp_fx", **(metadata or {})}.items():
            proto.metadata_props.add(key=key, value=value if isinstance(value, str) else json.dumps(value))

    def write(axes: Axes) -> Path:
        return write_checked(model, inputs, path, axes, opset, finish, check)

    if dynamic_axes is not None:
        if not dynamic_batch:
            raise InputError(
                "dynamic_batch=False fixes all axes: leave it out, and name in dynamic_axes those that stay open"
            )
        return write(given_axes(dynamic_axes, model, inputs, names, output_names))
    if not dynamic_batch:
        return write(tuple({} for _ in inputs))
    images = image_axes(model, inputs)
    if images is not None:
        with contextlib.suppress(BackendError):  # nobody asked for open image axes
            return write(images)
    return write(batch_axes(inputs))


def write_checked(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    path: Path,
    axes: Axes,
    opset: int | None,
    finish: Callable[[onnx.ModelProto], None],
    check: bool = True,
) -> Path:
    """Write a model with these open axes, as `export_onnx` does, and return the path; ``finish`` names it."""
    proto = _model_proto(model, inputs, axes, opset)
    finish(proto)
    with _replacing(path) as scratch:
        scratch.write_bytes(_serialise(proto))
        if check:
            compare_with_module(scratch, model, [inputs, *_at_other_sizes(model, inputs, axes)])
    return path


def _at_other_sizes(model: nn.Module, inputs: tuple[Tensor, ...], axes: Axes) -> list[tuple[Tensor, ...]]:
    """Return inputs of other sizes on all open axes, if there are any."""
    if not any(axes):
        return []
    other = next(other_sizes(model, inputs, axes), None)
    if other is None:
        raise BackendError(
            f"{type(model).__name__} takes no other sizes of {_listed(axes)}, which would stay open; no file written."
            f"{_fewer(axes)}"
        )
    return [other]


def _listed(axes: Axes) -> str:
    return ", ".join(dict.fromkeys(repr(name) for own in axes for name in own.values()))


def _fewer(axes: Axes) -> str:
    """Return advice for an error that open axes may have caused; "" if none are open."""
    if not any(axes):
        return ""
    if all(own == {0: "batch"} for own in axes):
        return (
            " If the network only works for one batch size, pass dynamic_batch=False; if an input has its batch on "
            "another axis, dynamic_axes={'x': {0: 'batch'}, 'state': {1: 'batch'}}."
        )
    return " Leave fewer axes open in dynamic_axes, or also those that must have the same sizes."


def export_model_proto(
    model: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
) -> onnx.ModelProto:
    """Return ``model`` in eval mode as an ONNX model in memory, cleaned, neither named nor checked."""
    inputs = as_tuple(example_inputs)
    return _model_proto(
        model, inputs, batch_axes(inputs) if dynamic_batch else tuple({} for _ in inputs), opset
    )


def _model_proto(
    model: nn.Module, inputs: tuple[Tensor, ...], axes: Axes, opset: int | None
) -> onnx.ModelProto:
    opset = DEFAULT_OPSET if opset is None else opset
    if not OLDEST_OPSET <= opset <= onnx.defs.onnx_opset_version():
        raise InputError(
            f"opset {opset}: {OLDEST_OPSET} to {onnx.defs.onnx_opset_version()} can be written with the "
            f"installed onnx {onnx.__version__}"
        )
    with eval_mode(model), torch.no_grad(), _quiet(), any_names():
        program = _export_program(model, inputs, axes)
        rename_weights(program)
        try:
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=max(opset, _EXPORTER_OPSET),
                verbose=False,
                custom_translation_table=TRANSLATIONS,
            )
        except Exception as error:
            fixed = " Try dynamic_batch=False, which makes all sizes constants." if any(axes) else ""
            raise BackendError(explain(error, program) + fixed) from error
        if exported is None:  # pragma: no cover - the dynamo exporter always returns a program
            raise BackendError("torch.onnx.export returned no program")
        proto = exported.model_proto
        fold_weights(proto)
        clean_model(proto)
        name_axes(proto, axes)
        if opset < _EXPORTER_OPSET:
            proto = lower_opset(proto)
    written = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    if written != opset:
        raise BackendError(
            f"the network cannot be written in ONNX opset {opset}: the exporter stayed at {written}; "
            f"pass opset={written}"
        )
    return proto


def write_model(proto: onnx.ModelProto, path: Path) -> None:
    """Write an ONNX model, whole or not at all."""
    with _replacing(path) as scratch:
        scratch.write_bytes(_serialise(proto))


def in_precision(
    model: nn.Module, inputs: tuple[Tensor, ...], precision: str
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a copy of the module and its inputs in "fp32" or "fp16"; integers keep their type."""
    kinds = {"fp32": torch.float32, "fp16": torch.float16}
    if precision not in kinds:
        raise InputError(f"precision {precision!r}: {' or '.join(kinds)} can be written")
    kind = kinds[precision]
    cast = tuple(tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in inputs)
    return copy.deepcopy(model).to(kind), cast


def as_tuple(example_inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the example inputs as a tuple of tensors; `InputError` for anything else."""
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
        kinds = ", ".join(type(i).__name__ for i in inputs) or "none"
        raise InputError(f"example_inputs must be a tensor or a tuple of tensors, and are: {kinds}")
    return inputs


def _export_program(model: nn.Module, inputs: tuple[Tensor, ...], axes: Axes) -> torch.export.ExportedProgram:
    shapes_of = [tuple(tensor.shape) for tensor in inputs]
    # A batch may have any size; a network may require that other sizes are multiples of a number.
    dims: dict[str, Any] = {
        name: torch.export.Dim(name) if name == "batch" else torch.export.Dim.DYNAMIC
        for own in axes
        for name in own.values()
    }
    shapes = tuple({axis: dims[name] for axis, name in own.items()} for own in axes) if dims else None
    # torch.export treats a size of 1 as a constant.
    single = {
        n for tensor, own in zip(inputs, axes, strict=True) for a, n in own.items() if tensor.shape[a] < 2
    }
    # Copies: torch.export marks the open axes on the tensor itself, and a second export would find the marks.
    copies = tuple(tensor.clone() for tensor in resized(inputs, axes, dict.fromkeys(single, 2)))
    try:
        with FourDimensionalAttention(), WholeRecurrentLayers():
            return torch.export.export(
                _plain_class(model),
                copies,
                dynamic_shapes=shapes,
                strict=False,
            )
    except SmcpError:
        raise
    except Exception as error:
        _require_runs(model, inputs, shapes_of)
        by_values = isinstance(error, GuardOnDataDependentSymNode)
        cure = (
            " Its Python asks for values of tensors, which a file cannot hold: export the parts, such as "
            "export_onnx(smaller.body, ...)."
        )
        raise BackendError(
            f"torch.export cannot capture {type(model).__name__} on inputs of shapes {shapes_of}: {first_line(error)}"
            f"{cure if by_values else _fewer(axes)}"
        ) from error


def _require_runs(model: nn.Module, inputs: tuple[Tensor, ...], shapes: list[tuple[int, ...]]) -> None:
    """Raise `InputError` if the model does not run on these inputs; its own `SmcpError`s pass through."""
    try:
        model(*(tensor.clone() for tensor in inputs))
    except SmcpError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} does not run on example inputs of shapes {shapes}: {first_line(error)}"
        ) from error


def _plain_class(model: nn.Module) -> nn.Module:
    """Return a graph module as a plain module with its generated forward, if it calls a foreign function.

    `torch.export` interprets a graph node by node, with lists that such a function (torchvision's windowed
    attention in three dimensions) cannot write into. The generated code has lists of its own. It also skips
    the branches that calls with left-out arguments do not take.
    """
    if not isinstance(model, fx.GraphModule) or not any(
        node.op == "call_function" and (node.target is left_out or _is_foreign(node.target))
        for node in model.graph.nodes
    ):
        return model
    plain: nn.Module = nn.Module.__new__(
        type(type(model).__name__, (nn.Module,), {"forward": type(model).forward})
    )
    plain.__dict__.update(model.__dict__)
    return plain


def _is_foreign(function: Any) -> bool:
    return str(getattr(function, "__module__", None)).split(".")[0] not in (
        "torch", "_operator", "builtins", "math", "None", "smcp_fx",
    )  # fmt: skip


def _serialise(proto: onnx.ModelProto) -> bytes:
    data: bytes = b""
    try:
        data = proto.SerializeToString()
    except Exception as error:
        raise BackendError(
            f"the ONNX model cannot be written as one file (2 GiB at most): {error}"
        ) from error
    return data


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a scratch file that becomes ``path`` at the end, or is removed if anything fails."""
    scratch = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BackendError(
                f"no space left to write {path}: free some, or choose another folder"
            ) from error
        raise BackendError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress, warnings and log lines off the terminal."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
