"""Fits smaller networks to the whole one, one layer at a time over all batches.

A ridge regression fits the weights of each convolution and linear, from its inputs in the smaller network
(repaired so far) to its outputs in the whole one. A batch norm's statistics change by the difference between
its inputs in the two networks, so that errors do not add up. The whole network runs once for all others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.calibration.batch_norms import Moments
from smcp_fx.calibration.batches import MEMORY, Batch
from smcp_fx.calibration.consumers import by_weight
from smcp_fx.calibration.frontier import Frontier, Values
from smcp_fx.calibration.layer_rows import Consumer, rows_for, some_of
from smcp_fx.calibration.norms import Normalisation, norms_of
from smcp_fx.calibration.progress import Progress, Stretch
from smcp_fx.calibration.regression import WIDEST, Use, solve
from smcp_fx.errors import InputError
from smcp_fx.passes.sliced_labels import Sliced

#: One image in this many is held out. Chosen, not measured.
_FOLD = 5


@dataclass(frozen=True)
class LayerRepair:
    """The repair of one layer; of several layers that share a weight, ``path`` is the first one's.

    ``before`` and ``after``: the squared error of its outputs on images held out, as a share of the outputs'
    spread; ``after`` comes from a fit without these images; the final fit uses all images. ``ridge``: the
    chosen strength, infinity if the weight stayed as it was. ``positions``: output positions fitted;
    ``inputs``: weights per output. ``left``: why the layer was skipped.
    """

    path: str
    before: float = 0.0
    after: float = 0.0
    ridge: float = float("inf")
    positions: int = 0
    inputs: int = 0
    left: str = ""

    @property
    def repaired(self) -> bool:
        """Whether its parameters were changed."""
        return self.after < self.before


@dataclass(frozen=True)
class RepairReport:
    """The result of `repair`: all layers in run order, the batch norms that were set, the images used."""

    layers: tuple[LayerRepair, ...]
    norms: tuple[str, ...]
    images: int

    def __str__(self) -> str:
        done = sum(layer.repaired for layer in self.layers)
        lines = [
            f"{done} of {len(self.layers)} layers repaired, {len(self.norms)} batch norms set, "
            f"on {self.images} images"
        ]
        for layer in self.layers:
            if layer.left:
                lines.append(f"  {layer.path}: left as it was, {layer.left}")
                continue
            few = f"; {layer.positions} positions for {layer.inputs} inputs" * (
                layer.positions < layer.inputs
            )
            error = (
                f"{layer.before:.3%} -> {layer.after:.3%}" if layer.repaired else f"{layer.before:.3%}, kept"
            )
            lines.append(f"  {layer.path}: error {error}{few}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Narrowed:
    """A smaller network: ``module``, which may hold Python, and its ``graph``: the same, or regions joined.

    ``kept``: labels without the removed channels; ``shared``: also without those that the whole network lacks.
    """

    module: nn.Module
    graph: fx.GraphModule
    kept: Sliced
    shared: Sliced


class SideBySide:
    """Runs the whole network and smaller ones over the same batches; more batches join as values shrink."""

    def __init__(
        self, networks: Sequence[Narrowed], whole: fx.GraphModule, batches: list[Batch], rows: float
    ) -> None:
        self.whole = Frontier(whole, [])
        self.waiting, self.rows = batches[::-1], rows
        self.images = sum(batch.images for batch in batches)
        self.norms = {norm.node.name: norm for uses in norms_of(whole) for norm in uses}
        self.moments: dict[str, Moments] = {}
        self.fits = [_Fit(self, network) for network in networks]
        self.frontiers = [self.whole, *(fit.smaller for fit in self.fits)]
        #: Peak bytes of the first batch's values from each node on, all networks together.
        self.needs, self.first = Counter[str](), batches[0].images
        for frontier in self.frontiers:
            self.needs.update(frontier.still_to_hold(batches[0]))

    def run(self, progress: Progress | None = None) -> list[RepairReport]:
        """Repair all layers of all networks in the order they run."""
        progressed, total = Stretch(progress), sum(len(fit.smaller.nodes) for fit in self.fits)
        place = {node.name: index for index, node in enumerate(self.whole.nodes)}
        nodes = [[(place.get(node.name, -1), fit, node) for node in fit.smaller.nodes] for fit in self.fits]
        # Advance the fit that is furthest behind, so that the whole network still holds the values it needs.
        for done, (_, fit, node) in enumerate(merge(*nodes, key=itemgetter(0))):
            fit.repair(node)
            progressed(done / total)
        progressed(1.0)
        return [fit.told() for fit in self.fits]

    def admit(self, name: str) -> None:
        """Add as many batches as fit into memory from this node on: early layers of large images get few."""
        while self.waiting:
            here = sum(batch.images for batch in self.whole.batches) + self.waiting[-1].images
            if self.whole.batches and here * self.needs[name] / self.first > MEMORY:
                return
            batch = self.waiting.pop()
            for frontier in self.frontiers:
                frontier.join(batch)

    def moments_of(self, norms: list[Normalisation]) -> Moments:
        """Return the moments of these norms' inputs in the whole network."""
        name = norms[0].node.name
        if name not in self.moments:
            self.moments[name] = _moments(self.whole, norms)
        return self.moments[name]


class _Fit:
    """One smaller network, repaired node by node."""

    def __init__(self, beside: SideBySide, network: Narrowed) -> None:
        self.beside, self.whole = beside, beside.whole
        self.kept, self.shared = network.kept, network.shared
        self.smaller = Frontier(network.graph, [])
        self.fold = min(_FOLD, max(beside.images, 2))
        groups, self.left = by_weight(network.graph)
        self.layers = {uses[0].node: uses for uses in groups}
        self.norms = {uses[0].node: uses for uses in norms_of(network.graph)}
        self.normalised = {norm.input for uses in self.norms.values() for norm in uses}
        self.exact = self._exact()
        self.report: list[LayerRepair] = []
        self.set: list[str] = []

    def repair(self, node: fx.Node) -> None:
        """Repair the node if it is a layer or norm; all nodes before it must be repaired already."""
        if not self.smaller.runs(node):
            return
        if node in self.exact:
            if node in self.layers:
                self.report.append(LayerRepair(self.layers[node][0].path))
        elif node in self.layers:
            self.beside.admit(node.name)
            self._layer(self.layers[node])
        elif node in self.norms:
            self.beside.admit(node.name)
            self._norm(self.norms[node])

    def told(self) -> RepairReport:
        """Return the report."""
        layers = (*self.report, *(LayerRepair(path, left=why) for path, why in self.left.items()))
        return RepairReport(layers, tuple(self.set), self.beside.images)

    def _exact(self) -> set[fx.Node]:
        """Return the nodes whose results equal the whole network's: they read no channel that either lacks.

        A layer or norm that is fitted for one of its uses changes in all of them.
        """
        labels, narrower = self.kept.channels.trail.labels, set[fx.Node]()
        for node in self.smaller.nodes:
            leaves = (leaf for leaf in pytree.tree_leaves(labels.get(node.name)) if isinstance(leaf, Tensor))
            if node.op != "get_attr" and not all(bool(self.shared.kept(leaf).all()) for leaf in leaves):
                narrower.add(node)
        together = [{use.node for use in uses} for uses in self.layers.values()]
        together += [{use.node for use in uses} for uses in self.norms.values()]
        changed = set[fx.Node]()
        while True:
            exact = set[fx.Node]()
            for node in self.smaller.nodes:
                inputs = node.all_input_nodes
                if (
                    node not in changed
                    and exact.issuperset(inputs)
                    and narrower.isdisjoint(inputs)
                    and self._unscaled(node)
                ):
                    exact.add(node)
            fitted = [
                nodes for nodes in together if not exact.issuperset(nodes) and not exact.isdisjoint(nodes)
            ]
            if not fitted:
                return exact
            changed.update(*fitted)

    def _unscaled(self, node: fx.Node) -> bool:
        """Whether batch-norm scalers left the node alone."""
        for norm in self.norms.get(node, ()):
            whole = self.beside.norms.get(norm.node.name)
            for mine, other in self._affine(norm, whole) if whole is not None else ():
                if not torch.equal(mine, other):
                    return False
        return True

    def _affine(self, norm: Normalisation, whole: Normalisation) -> list[tuple[Tensor, Tensor]]:
        """Pair the norm's weight and bias, if any, with the whole norm's values of the kept channels."""
        pairs = ((norm.weight, whole.weight), (norm.bias, whole.bias))
        return [
            (mine, self._left(other, norm)) for mine, other in pairs if mine is not None and other is not None
        ]

    def _left(self, value: Tensor, norm: Normalisation) -> Tensor:
        """Return the kept channels of ``value``, a tensor of the whole network's norm."""
        axis = self.kept.axis(self.kept.channels.trail.labels[norm.node.name])
        return value if axis is None else value.index_select(0, axis[1].to(value.device))

    # ---- layers -----------------------------------------------------------------------------------------

    def _layer(self, consumers: list[Consumer]) -> None:
        first = consumers[0]
        counterparts = [self.whole.by_name.get(consumer.node.name) for consumer in consumers]
        if None in counterparts:
            self.report.append(LayerRepair(first.path, left="the whole network runs it elsewhere"))
            return
        labels = self.kept.channels.trail.labels
        if any(labels.get(consumer.node.name) is None for consumer in consumers):
            self.report.append(LayerRepair(first.path, left="its outputs are mixed into a weight"))
            return
        matrix = first.matrix(first.weight)
        if matrix.shape[1] > WIDEST:
            why = f"its {matrix.shape[1]} inputs are too many for a regression (at most {WIDEST})"
            self.report.append(LayerRepair(first.path, left=why))
            return
        uses = self._gathered(consumers, [node for node in counterparts if node is not None])
        rows = [sums for use in uses.values() for sums in (use.fit, use.held_out)]
        if not all(sums.finite for sums in rows):
            raise InputError(
                f"activations at {first.path!r} are NaN or infinite, in the whole or in the sliced network: there is "
                "nothing to fit"
            )
        fitted, held_out = (sum(s.count for s in rows[side::2]) for side in (0, 1))
        if not (fitted and held_out):
            self.report.append(
                LayerRepair(first.path, left="too few images to hold some out: give two or more")
            )
            return
        rounding = max((8 * torch.finfo(first.weight.dtype).eps) ** 2, 1e-14)
        best = solve(
            list(uses.values()), matrix, lambda weight: first.matrix(first.unmatrix(weight)), rounding
        )
        if best.after < best.before:
            first.weight.copy_(first.unmatrix(best.weight))
            biases = {id(c.bias): c.bias for c in consumers if c.bias is not None}
            for key, bias in zip(uses, best.biases, strict=True):
                if key in biases and bias is not None:
                    biases[key].copy_(bias.flatten())
        self.report.append(
            LayerRepair(
                first.path, best.before, best.after, best.ridge, fitted + held_out, int(matrix.shape[1])
            )
        )

    def _gathered(self, consumers: list[Consumer], whole: list[fx.Node]) -> dict[int, Use]:
        """Return the rows of all uses, grouped by bias."""
        uses: dict[int, Use] = {}
        keys = [id(c.node) if c.bias is None else id(c.bias) for c in consumers]
        for consumer, key in zip(consumers, keys, strict=True):
            uses.setdefault(key, self._use(consumer))
        matrix = consumers[0].matrix(consumers[0].weight)
        wanted = self.beside.rows * rows_for(int(matrix.shape[1]))
        quota = math.ceil(wanted / (len(self.smaller.batches) * len(consumers)))
        generator = torch.Generator().manual_seed(0)
        seen = [0] * len(consumers)
        gone = [self.kept.axis(self.kept.channels.trail.labels[consumer.node.name]) for consumer in consumers]
        for batch in range(len(self.smaller.batches)):
            inputs, outputs = self._pairs(batch, consumers, whole)
            for index, (consumer, key) in enumerate(zip(consumers, keys, strict=True)):
                x, y, kept = inputs[index], outputs[index], gone[index]
                channels = None
                if kept is not None and kept[0] == y.dim() - 1 - consumer.rank:
                    channels = kept[1]  # select in the rows, which are fewer
                elif kept is not None:
                    y = y.index_select(kept[0], kept[1].to(y.device))
                images, positions = consumer.positions(y)
                chosen = some_of(positions, -(-quota // images), generator)
                last = (seen[index] + torch.arange(images)) % self.fold == self.fold - 1
                seen[index] += images
                before = matrix.to(y)
                for sums, part in ((uses[key].fit, ~last), (uses[key].held_out, last)):
                    for rows in consumer.rows(x, y, part.nonzero().flatten(), chosen, channels):
                        sums.add_pairs(*rows, before)
        return uses

    def _pairs(
        self, batch: int, consumers: list[Consumer], whole: list[fx.Node]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return each use's inputs in the smaller network and outputs in the whole one."""
        self.smaller.advance(consumers[0].node, past=False)
        if len(consumers) == 1:
            self.whole.advance(whole[0])
            inputs = [self.smaller.values[batch][consumers[0].input]]
            outputs = [self.whole.values[batch][whole[0]]]
        else:
            self.whole.advance(whole[0], past=False)
            sources = {c.node: c.input for c in consumers}
            here = self.smaller.ahead(batch, set(sources), lambda node, values: _copy(values, sources[node]))
            there = self.whole.ahead(batch, set(whole), lambda node, values: _copy(values, node))
            inputs = [here[c.node] for c in consumers]
            outputs = [there[node] for node in whole]
        return inputs, outputs

    def _use(self, consumer: Consumer) -> Use:
        if consumer.bias is not None:
            return Use("bias", consumer.bias.detach().double().reshape(consumer.groups, -1))
        behind = consumer.node in self.normalised and len(consumer.node.users) == 1
        return Use("norm" if behind else "none", None)

    # ---- batch norms ------------------------------------------------------------------------------------

    def _norm(self, norms: list[Normalisation]) -> None:
        """Adjust the statistics by the difference between the inputs in the smaller and in the whole network.

        Both networks see the same images, so that their peculiarities cancel. The whole network's weight and
        bias replace the norm's, since batch-norm scales may have changed them.
        """
        first = norms[0]
        wholes = [self.beside.norms[norm.node.name] for norm in norms if norm.node.name in self.beside.norms]
        if len(wholes) < len(norms):
            return
        here, there = _moments(self.smaller, norms), self.beside.moments_of(wholes)
        mean = self._left(wholes[0].mean.double() - there.mean, first) + here.mean
        growth = (here.variance + first.eps) / (self._left(there.variance, first) + first.eps)
        variance = (self._left(wholes[0].variance.double(), first) + first.eps) * growth - first.eps
        if not all(bool(torch.isfinite(value.to(first.mean)).all()) for value in (mean, variance)):
            raise InputError(
                f"what reaches batch norm {first.path!r} has a mean or variance that is not finite in "
                f"{first.mean.dtype}: some activations are NaN or infinite"
            )
        first.mean.copy_(mean)
        first.variance.copy_(variance.clamp(min=0))
        for mine, other in self._affine(first, wholes[0]):
            mine.copy_(other)
        self.set.append(first.path)


def _moments(frontier: Frontier, norms: list[Normalisation]) -> Moments:
    """Return the moments of the inputs of these norms, over all batches."""
    moments = Moments()
    sources = {norm.node: norm.input for norm in norms}
    frontier.advance(norms[0].node, past=False)
    for batch in range(len(frontier.batches)):
        if len(norms) == 1:
            moments.add(frontier.values[batch][norms[0].input])
            continue
        inputs = frontier.ahead(batch, set(sources), lambda node, values: _copy(values, sources[node]))
        for value in inputs.values():
            moments.add(value)
    return moments


def _copy(values: Values, node: fx.Node) -> Tensor:
    copied: Tensor = values[node].clone()
    return copied
