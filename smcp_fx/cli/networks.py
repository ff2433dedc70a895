"""The options that name a network and a runtime, and what they stand for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from smcp_fx.errors import InputError

if TYPE_CHECKING:
    from smcp_fx.backends.base import Backend
    from smcp_fx.blocks.cutting import FusedBlock


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
    engines = parser.add_argument_group("TensorRT")
    engines.add_argument("--precision", default="fp16", choices=("fp32", "fp16", "bf16"),
                         help="of the engines (default: fp16)")  # fmt: skip
    engines.add_argument("--worker-python", metavar="COMMAND",
                         help="the Python that has TensorRT, where it is not this one")  # fmt: skip
    engines.add_argument("--builders", type=int, default=1, metavar="N",
                         help="processes that build beside each other (default: 1)")  # fmt: skip
    engines.add_argument("--tactic-sources-off", nargs="*", default=(), metavar="NAME",
                         help="libraries the builder is not to use: CUBLAS CUBLAS_LT CUDNN")  # fmt: skip
    engines.add_argument("--version-compatible", action="store_true",
                         help="rows for engines that later TensorRT versions run, too (from 8.6)")  # fmt: skip


def backend_of(arguments: argparse.Namespace) -> Backend:
    """Return the backend that the options name."""
    from smcp_fx.backends import get_backend

    options: dict[str, Any] = {"threads": arguments.threads}
    if arguments.backend == "tensorrt":
        options |= {
            "precision": arguments.precision, "worker_python": arguments.worker_python,
            "builders": arguments.builders, "tactic_sources_off": tuple(arguments.tactic_sources_off),
            "version_compatible": arguments.version_compatible,
        }  # fmt: skip
    return get_backend(arguments.backend, **options)


def blocks_of(arguments: argparse.Namespace) -> list[FusedBlock]:
    """Return the blocks of the network that the options name."""
    from smcp_fx.blocks.cutting import cut
    from smcp_fx.channels import build
    from smcp_fx.tracing.example_inputs import first_convolution
    from smcp_fx.tracing.other_sizes import at_another_size
    from smcp_fx.tracing.tracer import trace
    from smcp_fx.zoo.models import build_model, example_images

    if arguments.batch < 1 or arguments.multiple < 1:
        raise InputError("--batch and --multiple must be at least 1")
    model = build_model(arguments.model)
    first = first_convolution(model)
    channels = 3 if first is None else first.in_channels
    shape = _size(arguments.input_size, channels)
    traced = trace(model, (example_images(arguments.batch, *shape),))
    other = at_another_size(traced)
    return cut(traced, build(traced.module, traced.values, multiple=arguments.multiple, other=other))


def _size(text: str, channels: int) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"--input-size {text!r}: give a side (224), or sizes without the batch (3x224x224)")
    return (channels, sizes[0], sizes[0]) if len(sizes) == 1 else sizes
