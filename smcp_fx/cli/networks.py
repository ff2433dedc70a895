"""The options that name a network and a runtime, and their meaning."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from smcp_fx.backends.tensorrt.options import EngineSettings
from smcp_fx.cli.flags import add_options, chosen
from smcp_fx.errors import InputError

if TYPE_CHECKING:
    from smcp_fx.backends.base import Backend
    from smcp_fx.blocks.fused import FusedBlock


def add_network_options(parser: argparse.ArgumentParser, model: bool = False) -> None:
    """Add the options that say which network at which size, and measured in what."""
    if model:
        parser.add_argument(
            "--model", metavar="MODEL", help="torchvision:NAME, timm:NAME, or file.py:factory"
        )
    parser.add_argument("--batch", type=int, default=1, help="batch size (default: 1)")
    parser.add_argument("--input-size", metavar="SIZE", default="224",
                        help="a side (224), or sizes without the batch (3x224x224); default: 224")  # fmt: skip
    parser.add_argument("--multiple", type=int, default=8, help="widths in multiples of this (default: 8)")
    parser.add_argument("--backend", default="onnxruntime", choices=("onnxruntime", "tensorrt", "torch"),
                        help="runtime to measure in (default: onnxruntime)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="threads of the runtime (default: 1)")
    add_options(parser.add_argument_group("TensorRT"), EngineSettings)


def backend_of(arguments: argparse.Namespace) -> Backend:
    """Return the backend that the options name."""
    from smcp_fx.backends import get_backend

    engines = chosen(EngineSettings, vars(arguments)).of_backend if arguments.backend == "tensorrt" else {}
    return get_backend(arguments.backend, threads=arguments.threads, **engines)


def blocks_of(arguments: argparse.Namespace) -> list[FusedBlock]:
    """Return the blocks of the network that the options name."""
    from smcp_fx.blocks.cutting import cut
    from smcp_fx.channels import build
    from smcp_fx.tracing.example_inputs import shape_of_text
    from smcp_fx.tracing.other_sizes import at_another_size
    from smcp_fx.tracing.tracer import trace
    from smcp_fx.zoo.models import build_model, example_images

    if arguments.batch < 1 or arguments.multiple < 1:
        raise InputError("--batch and --multiple must be at least 1")
    model = build_model(arguments.model)
    try:
        shape = shape_of_text(model, arguments.input_size, arguments.batch)
    except InputError as error:
        raise InputError(f"--input-size {arguments.input_size!r}: {error}") from error
    if shape[0] != arguments.batch:
        raise InputError(f"--input-size {arguments.input_size!r} includes a batch: give that as --batch")
    traced = trace(model, (example_images(*shape),))
    other = at_another_size(traced)
    return cut(traced, build(traced.module, traced.values, multiple=arguments.multiple, other=other))
