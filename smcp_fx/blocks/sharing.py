"""Blocks as a latency table sees them, and which of them share rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from smcp_fx.errors import InputError

#: For each free width of a block, the values that it can take, ascending.
Grids = tuple[tuple[int, ...], ...]


class Block(Protocol):
    """A part of a network that the engine runs as one fused kernel, with up to two free widths.

    ``name``: where it is, for messages. ``signature``: canonical JSON of everything but the widths; blocks of one
    signature share their rows. ``grids``: for each free width the values that it can take, ascending.
    ``read_before``: inputs, by position, that another block has already converted into the layout that this one
    reads, if the runtime has layouts. ``fed_by``: how each input is written (`blocks.feeding`); if empty, all are
    written by convolutions. ``weight_bytes``: the size of its weights at the full widths.
    """

    @property
    def name(self) -> str: ...

    @property
    def signature(self) -> str: ...

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def read_before(self) -> tuple[int, ...]: ...

    @property
    def fed_by(self) -> tuple[str, ...]: ...

    @property
    def weight_bytes(self) -> float: ...

    def build(self, widths: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return an eval-mode module with random weights at ``widths``, and its example inputs."""
        ...


@dataclass(frozen=True)
class _Widened:
    """The largest of several blocks of one signature, on their united grids."""

    largest: Block
    grids: Grids

    @property
    def name(self) -> str:
        return self.largest.name

    @property
    def signature(self) -> str:
        return self.largest.signature

    @property
    def read_before(self) -> tuple[int, ...]:
        return self.largest.read_before

    @property
    def fed_by(self) -> tuple[str, ...]:
        return self.largest.fed_by

    @property
    def weight_bytes(self) -> float:
        return self.largest.weight_bytes

    def build(self, widths: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return self.largest.build(widths)


def priced_as(blocks: Iterable[Block]) -> dict[tuple[str, Grids], Block]:
    """Return the block whose rows price each block, by signature and grids: the largest, at least as wide everywhere.

    The layers of a DenseNet's block, for instance, differ only in how many channels they may read. They are measured
    once rather than each around its own full size.
    """
    alike: dict[str, dict[Grids, Block]] = {}
    for block in blocks:
        alike.setdefault(block.signature, {}).setdefault(block.grids, block)
    homes: dict[tuple[str, Grids], Block] = {}
    for signature, of_grids in alike.items():
        members: dict[Grids, list[Grids]] = {}
        largest = sorted(of_grids, key=lambda grids: -math.prod(grid[-1] for grid in grids))
        for own in largest:
            home = next(grids for grids in largest if _reaches(grids, own))
            members.setdefault(home, []).append(own)
        for home, those in members.items():
            grids = tuple(tuple(sorted(set().union(*values))) for values in zip(*those, strict=True))
            block = of_grids[home] if grids == home else _Widened(of_grids[home], grids)
            homes.update({(signature, own): block for own in those})
    return homes


def rows_by_block(
    rows: Iterable[tuple[Block, tuple[int, ...]]], blocks: Iterable[Block]
) -> list[tuple[Block, list[tuple[int, ...]]]]:
    """Return rows of ``blocks`` by the block that each is measured in: the one whose rows price it (`priced_as`)."""
    homes = priced_as(blocks)
    points_of: dict[tuple[str, Grids], tuple[Block, list[tuple[int, ...]]]] = {}
    for block, point in rows:
        home = homes.get((block.signature, block.grids), block)
        points_of.setdefault((home.signature, home.grids), (home, []))[1].append(point)
    return list(points_of.values())


def _reaches(grids: Grids, others: Grids) -> bool:
    return len(grids) == len(others) and all(a[-1] >= b[-1] for a, b in zip(grids, others, strict=True))


def unique_blocks(blocks: Iterable[Block], shard: int = 1, shards: int = 1) -> list[Block]:
    """Return blocks that share no rows, in order; of these every ``shards``-th, beginning with number ``shard``."""
    if not 1 <= shard <= shards:
        raise InputError(f"shard {shard}/{shards}: give i/n with 1 <= i <= n")
    unique = list({(block.signature, block.grids): block for block in priced_as(blocks).values()}.values())
    mine = set(list(dict.fromkeys(block.signature for block in unique))[shard - 1 :: shards])
    return [block for block in unique if block.signature in mine]
