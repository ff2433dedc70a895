"""Options for a network and a runtime, and the objects that they name."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smcp_fx.backends import PRECISIONS, backend_names, get_backend
from smcp_fx.cli.flags import add_backend_options, fractions, own_options
from smcp_fx.config import PruningConfig
from smcp_fx.errors import InputError

if TYPE_CHECKING:
    from smcp_fx.backends.base import Backend, Fingerprint
    from smcp_fx.blocks.fused import FusedBlock
    from smcp_fx.blocks.sharing import Block
    from smcp_fx.channels import ChannelGraph
    from smcp_fx.latency.network import Measurer, NetworkLatency
    from smcp_fx.latency.table import LatencyTable
    from smcp_fx.tracing.tracer import Traced


def add_targets_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to take only the rows that pruning to given fractions needs."""
    parser.add_argument("--targets", type=fractions, metavar="LIST",
                        help="only the rows that prunings to these fractions rest on (0.6,0.4,0.25), in rounds; "
                        "without it the whole range of every width")  # fmt: skip


@dataclass(frozen=True)
class Network:
    """The network that the options name, its channels and its blocks."""

    traced: Traced
    channels: ChannelGraph
    blocks: list[FusedBlock]

    def latency(
        self, table: LatencyTable, fingerprint: Fingerprint, measurer: Measurer | None = None
    ) -> NetworkLatency:
        """Return the latency by a table's rows; without a ``measurer``, as if all weights were in cache."""
        from smcp_fx.latency.network import NetworkLatency
        from smcp_fx.latency.residency import Residency

        here = Residency(math.inf) if measurer is None else Residency.of_cache(measurer.backend.cache_bytes())
        return NetworkLatency.bind(
            self.traced, self.channels, self.blocks, table, fingerprint, here, measurer
        )


def wanted_of(
    network: Network,
    targets: Sequence[float] | None,
    blocks: Sequence[Block],
    table: LatencyTable,
    fingerprint: Fingerprint,
) -> list[tuple[Block, tuple[tuple[int, ...], ...]]]:
    """Return the next rows to measure on another device, by block; ``blocks``: some of the network's."""
    from smcp_fx.blocks.sharing import rows_by_block
    from smcp_fx.latency.rounds import rows_for_targets

    wanted = table.wanted(blocks, fingerprint, whole=not targets)
    if wanted or not targets:
        return wanted
    latency, mine = network.latency(table, fingerprint), {block.signature for block in blocks}
    rows = [(block, point) for block, point in rows_for_targets(latency, targets) if block.signature in mine]
    return [(block, tuple(points)) for block, points in rows_by_block(rows, network.blocks)]


def add_network_options(parser: argparse.ArgumentParser, model: bool = False) -> None:
    """Add the options for the network, its input size, and the runtime to measure in."""
    if model:
        parser.add_argument(
            "--model", metavar="MODEL", help="torchvision:NAME, timm:NAME, onnx:FILE, or file.py:factory"
        )
        parser.add_argument("--device", metavar="NAME", help="whose rows (default: those of this machine)")
    parser.add_argument("--batch", type=int, default=1, help="batch size (default: 1)")
    parser.add_argument("--input-size", metavar="SIZE",
                        help="a side (224), or sizes without the batch (3x224x224), of several inputs of an ONNX "
                        "file with commas; default: 224, or the file's own")  # fmt: skip
    parser.add_argument("--multiple", type=int, default=8, help="widths in multiples of this (default: 8)")
    parser.add_argument("--backend", default="onnxruntime", choices=backend_names(),
                        help="runtime to measure in (default: onnxruntime)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="threads of the runtime (default: 1)")
    parser.add_argument("--precision", choices=PRECISIONS,
                        help="precision that the network runs in (default: the runtime's own)")  # fmt: skip
    add_backend_options(parser)


def backend_of(arguments: argparse.Namespace) -> Backend:
    """Return the backend that the options name."""
    own = own_options(arguments.backend, vars(arguments))
    return get_backend(arguments.backend, threads=arguments.threads, precision=arguments.precision, **own)


def fingerprint_of(arguments: argparse.Namespace) -> Fingerprint:
    """Return the fingerprint of the backend and the device that the options name."""
    fingerprint = backend_of(arguments).fingerprint()
    return replace(fingerprint, device=arguments.device) if arguments.device else fingerprint


def blocks_of(arguments: argparse.Namespace) -> list[FusedBlock]:
    """Return the blocks of the network that the options name."""
    return network_of(arguments).blocks


def network_of(arguments: argparse.Namespace) -> Network:
    """Return the network that the options name."""
    from smcp_fx.analysis import analyse
    from smcp_fx.blocks.cutting import cut
    from smcp_fx.zoo.models import network_and_inputs

    if arguments.batch < 1 or arguments.multiple < 1:
        raise InputError("--batch and --multiple must be at least 1")
    usual = None if arguments.model.startswith("onnx:") else "224"
    model, inputs = network_and_inputs(arguments.model, arguments.input_size or usual, arguments.batch)
    assert inputs is not None
    if len(inputs[0]) != arguments.batch:
        raise InputError(f"--input-size {arguments.input_size!r} includes a batch: give that as --batch")
    analysis = analyse(model, inputs, config=PruningConfig(multiple=arguments.multiple))
    return Network(analysis.traced, analysis.channels, cut(analysis.traced, analysis.channels))
