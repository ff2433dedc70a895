"""The latency of a block between its measured widths, and how certain that is.

A block's latency is nearly `a + b x + c y + d x y` in its two widths, once these are counted as the runtime counts
them (`Scale`). The logarithm of the remaining factor is smooth, and is modelled by a Gaussian process of fixed length
scales and variances, whose posterior variance says how certain a price is. Rows may lie anywhere, and each makes all
prices more certain. At a measured width, the price is what was measured.

Rasmussen and Williams, Gaussian Processes for Machine Learning (2006): algorithm 2.1; leaving one out, section 5.4.2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from smcp_fx.blocks.sharing import Grids
from smcp_fx.errors import InputError, TableError
from smcp_fx.latency.scale import SCALES, Floats, Scale

Point = tuple[int, ...]
Ints = NDArray[np.int64]

#: Standard deviations, in logarithms, of the factor that the bilinear form leaves: its constant part, each
#: width's part, the joint part and the fast part; of the other path's cost, and its change along the width;
#: of a row's noise. Chosen by how well they predict held-out rows of five networks (docs: experiments.md).
_ALIKE, _EACH, _BOTH, _FAST, _PATH, _ALONG, _ROW = 0.05, 0.10, 0.10, 0.04, 0.7, 0.15, 0.015
#: Length scales, in logarithms of widths, of the slow and the fast parts. Chosen as the line above.
_SLOWLY, _QUICKLY = 1.0, 0.35
#: The bilinear form's coefficients before any row is known, as shares of the largest latency, and their weight in the
#: fit. Chosen as the lines above.
_FORM, _SURELY = (0.03, 0.06, 0.06, 0.85), 0.5
#: A row this many standard deviations from the others' prediction is measured again. The usual three.
_SURPRISE = 3.0
#: A scale must raise the rows' log-likelihood by this over a plainer one. Chosen, not measured.
_MARGIN = 1.0
#: No block is faster than this. (A clock too coarse for a block says 0.)
_LEAST_MS = 1e-6


class Surface:
    """The latency of one block as a function of its widths; call it with one int array per free width.

    ``rows``: ms by widths, at least one. ``scales``: one per width; plain ones by default.
    """

    def __init__(self, grids: Grids, rows: Mapping[Point, float], scales: Sequence[Scale] = ()) -> None:
        self.grids, self.scales = grids, tuple(scales) or (Scale(),) * len(grids)
        self.rows = {point: max(ms, _LEAST_MS) for point, ms in rows.items()}
        self._seen = dict(self.rows)
        self._at = tuple(np.array(widths, np.int64) for widths in zip(*self.rows, strict=True))
        measured = np.array(list(self.rows.values()))
        self._form = self._fitted(measured)
        self._left = np.log(measured / self._bilinear(self._at))
        kernel = self._kernel(self._at) + _ROW**2 * np.eye(len(measured))
        self._factor = cho_factor(kernel, lower=True)
        self._weights: Floats = cho_solve(self._factor, self._left)

    def __call__(self, *widths: Ints) -> Floats:
        """Return the latencies in ms, of the broadcast shape; `TableError` outside the measured range."""
        if all(np.ndim(one) == 0 for one in widths):  # callers often ask for the same single points
            point = tuple(int(one) for one in widths)
            if point not in self._seen:
                self._seen[point] = float(self._between(self._checked(widths)))
            return np.asarray(self._seen[point])
        at = self._checked(widths)
        latencies = self._between(at)
        for point, ms in self.rows.items():
            latencies = np.where(_is_at(point, at), ms, latencies)
        return latencies

    def _between(self, at: Sequence[Ints]) -> Floats:
        logs = np.asarray(self._constant, np.float64)
        for axis, line in enumerate(self._lines):
            logs = logs + line[at[axis] - self.grids[axis][0]]
        if len(at) == 2:
            x, y = (side[one - grid[0]] for side, one, grid in zip(self._sides, at, self.grids, strict=True))
            logs = logs + np.einsum("...n,...n->...", x, y)
        latencies: Floats = self._bilinear(at) * np.exp(logs)
        return latencies

    def doubt(self, *widths: Ints) -> Floats:
        """Return the relative standard deviation of the latencies at these widths; 0 where they were measured."""
        at = tuple(np.ravel(one) for one in np.broadcast_arrays(*self._checked(widths)))
        if not at:
            return np.zeros(())
        beside = self._kernel(at)
        always = _ALIKE**2 + len(at) * _EACH**2 + _BOTH**2 + _FAST**2
        own = always + sum(
            scale.off(one) * (_PATH**2 + _ALONG**2) for scale, one in zip(self.scales, at, strict=True)
        )
        explained = np.einsum("ij,ji->i", beside, cho_solve(self._factor, beside.T))
        sure = np.zeros(at[0].shape, bool)
        for point in self.rows:
            sure |= _is_at(point, at)
        doubt = np.sqrt(np.maximum(own - explained, 0.0) + _ROW**2)
        return np.where(sure, 0.0, doubt).reshape(np.broadcast_shapes(*(np.shape(one) for one in widths)))

    def likelihood(self) -> float:
        """Return the log-likelihood of its rows, up to a constant."""
        factor, _ = self._factor
        return float(-0.5 * self._left @ self._weights - np.log(np.diag(factor)).sum())

    def surprises(self) -> list[Point]:
        """Return the rows over three standard deviations from the others' prediction, the worst first."""
        inverse = cho_solve(self._factor, np.eye(len(self.rows)))
        far = np.abs(self._weights) / np.sqrt(np.diag(inverse))
        points = list(self.rows)
        return [points[i] for i in np.argsort(-far) if far[i] > _SURPRISE and len(points) > 1]

    def left_out(self) -> dict[Point, float]:
        """Return the ms that the other rows predict for each row."""
        if len(self.rows) < 2:
            return {}
        inverse = cho_solve(self._factor, np.eye(len(self.rows)))
        missed = self._weights / np.diag(inverse)
        return {p: ms / float(np.exp(m)) for (p, ms), m in zip(self.rows.items(), missed, strict=True)}

    # ---- the bilinear form, and what is left of it --------------------------------------------------------------

    def _fitted(self, measured: Floats) -> Floats:
        """Fit the form's coefficients, none negative, by least squares of relative errors."""
        from scipy.optimize import nnls  # here: it takes a third of a second to import

        top = float(measured[max(range(len(measured)), key=list(self.rows).__getitem__)])
        terms = self._terms(self._at, len(measured))
        form = np.array(_FORM if len(self.grids) == 2 else (_FORM[0], sum(_FORM[1:])))[: terms.shape[1]]
        rows = np.concatenate([terms * (top / measured)[:, None], _SURELY * np.eye(len(form))])
        shares, _ = nnls(rows, np.concatenate([np.ones(len(measured)), _SURELY * form]))
        return np.asarray(top * np.maximum(shares, 1e-4))

    def _bilinear(self, at: Sequence[Ints]) -> Floats:
        if not at:
            return np.asarray(self._form.sum(), np.float64)
        terms: list[Floats] = self._shares(at)
        if len(terms) == 1:
            return np.asarray(self._form[0] + self._form[1] * terms[0])
        (x, y), (a, b, c, d) = terms, self._form
        return np.asarray(a + b * x + c * y + d * x * y)

    def _terms(self, at: Sequence[Ints], count: int) -> Floats:
        shares = self._shares(at)
        columns = [np.ones(count), *shares, *([shares[0] * shares[1]] if len(shares) == 2 else [])]
        return np.stack(columns, axis=1)

    def _shares(self, at: Sequence[Ints]) -> list[Floats]:
        """Return widths on their scales, as shares of the full width."""
        axes = zip(self.scales, at, self.grids, strict=True)
        return [scale.coordinate(one) / scale.coordinate(grid[-1]) for scale, one, grid in axes]

    def _kernel(self, at: Sequence[Ints]) -> Floats:
        """Return the covariances of widths with the rows, [widths, rows]."""
        parts = [self._parts(axis, one) for axis, one in enumerate(at)]
        if not parts:
            return np.full((1, 1), _ALIKE**2)
        slow, fast = (np.multiply.reduce([part[i] for part in parts]) for i in (0, 1))
        each = sum(_EACH**2 * part[0] + part[2] for part in parts)
        return np.asarray(_ALIKE**2 + each + _BOTH**2 * slow + _FAST**2 * fast)

    def _parts(self, axis: int, widths: Ints) -> tuple[Floats, Floats, Floats]:
        """Return covariances [widths, rows] along one axis: the slow part, the fast part, and the other path's."""
        scale, rows = self.scales[axis], self._at[axis]
        here, there = (np.log(scale.coordinate(one)) for one in (widths, rows))
        apart = np.abs(here[:, None] - there[None, :])
        slow, fast = (_matern(apart / length) for length in (_SLOWLY, _QUICKLY))
        both_off = scale.off(widths)[:, None] * scale.off(rows)[None, :]
        return slow, fast, both_off * (_PATH**2 + _ALONG**2 * slow)

    @cached_property
    def _constant(self) -> float:
        return float(_ALIKE**2 * self._weights.sum())

    @cached_property
    def _lines(self) -> list[Floats]:
        """Each width's own part, from the smallest width to the full one."""
        lines = []
        for grid, (slow, fast, path) in zip(self.grids, self._along, strict=True):
            alone = _BOTH**2 * slow + _FAST**2 * fast if len(self.grids) == 1 else 0.0
            lines.append(np.asarray((_EACH**2 * slow + path + alone) @ self._weights))
            assert len(lines[-1]) == grid[-1] - grid[0] + 1
        return lines

    @cached_property
    def _sides(self) -> tuple[Floats, Floats]:
        """The joint part of two widths: the sum over the last axis of one side's values times the other's."""
        (slow_x, fast_x, _), (slow_y, fast_y, _) = self._along
        x = np.concatenate([_BOTH**2 * slow_x * self._weights, _FAST**2 * fast_x * self._weights], axis=1)
        return x, np.concatenate([slow_y, fast_y], axis=1)

    @cached_property
    def _along(self) -> list[tuple[Floats, Floats, Floats]]:
        return [self._parts(axis, np.arange(grid[0], grid[-1] + 1)) for axis, grid in enumerate(self.grids)]

    def _checked(self, widths: Sequence[Ints]) -> tuple[Ints, ...]:
        if len(widths) != len(self.grids):
            raise InputError(f"{len(widths)} widths were given, the block has {len(self.grids)}")
        arrays = tuple(np.asarray(one, np.int64) for one in widths)
        for grid, array in zip(self.grids, arrays, strict=True):
            if array.size and (array.min() < grid[0] or array.max() > grid[-1]):
                outside = array[(array < grid[0]) | (array > grid[-1])].flat[0]
                raise TableError(
                    f"{outside} channels were asked for, {grid[0]} to {grid[-1]} were measured; "
                    "measure the block on a wider grid"
                )
        return arrays


def choose_scales(alike: Sequence[tuple[Grids, Mapping[Point, float]]]) -> tuple[Scale, ...]:
    """Return the scales, one per width, that make the rows of one kind of block most likely; plain ones win ties."""
    scales = [Scale()] * len(alike[0][0])
    best = _likelihood(alike, scales)
    for _, axis in itertools.product(range(2), range(len(scales))):
        for scale in SCALES:
            other = [*scales[:axis], scale, *scales[axis + 1 :]]
            likely = _likelihood(alike, other)
            if likely > best + _MARGIN:
                scales, best = other, likely
    return tuple(scales)


def _likelihood(alike: Sequence[tuple[Grids, Mapping[Point, float]]], scales: Sequence[Scale]) -> float:
    return sum(Surface(grids, rows, scales).likelihood() for grids, rows in alike)


def _is_at(point: Point, widths: Sequence[Ints]) -> NDArray[np.bool_]:
    return functools.reduce(np.logical_and, [one == width for one, width in zip(widths, point, strict=True)])


def _matern(distance: Floats) -> Floats:
    """Matérn's covariance of smoothness 5/2."""
    r = np.sqrt(5) * distance
    return np.asarray((1 + r + r * r / 3) * np.exp(-r))
