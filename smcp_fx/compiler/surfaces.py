"""The latency surfaces of a network's slowest blocks, for the report."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from smcp_fx.latency.network import NetworkLatency
from smcp_fx.report.heat_map import thinned
from smcp_fx.report.schema import Axis, SurfaceRow

#: Blocks that the report shows: the slowest one of each shape. Chosen, not measured.
_SHOWN = 8


def surfaces(latency: NetworkLatency, counts: Mapping[str, int]) -> tuple[SurfaceRow, ...]:
    """Return the surfaces that `smcp_fx.report.heat_map.heat_map` draws, slowest block first.

    Hot and cold rows are weighted as for the pruned network with these counts.
    """
    by_block = latency.surfaces(latency.share(counts))
    dearest: dict[str, tuple[float, SurfaceRow]] = {}
    for block in latency.blocks:
        if not block.widths:
            continue
        surface = by_block[block.signature, block.grids]
        dense_ms = float(surface(*(np.asarray(width) for width in block.full_widths)))
        if dense_ms <= dearest.get(block.signature, (0.0, None))[0]:
            continue
        values = [[grid[i] for i in thinned(grid)] for grid in block.grids]
        at = np.ix_(*(np.asarray(v, dtype=np.int64) for v in values))
        titles = ("channels in", "channels out") if len(values) == 2 else ("channels",)
        dearest[block.signature] = (
            dense_ms,
            SurfaceRow(
                name=block.name,
                axes=tuple(Axis(title, tuple(v)) for title, v in zip(titles, values, strict=True)),
                ms=surface(*at).tolist(),
                measured=tuple(surface.rows),
                chosen=tuple(width.channels(counts) for width in block.widths),
                full=tuple(block.full_widths),
            ),
        )
    return tuple(by_block for _, by_block in sorted(dearest.values(), key=lambda pair: -pair[0])[:_SHOWN])
