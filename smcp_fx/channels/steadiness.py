"""Channels that go together at one size of the images, but not at another, must stay.

    y = x.flatten(2).transpose(1, 2)      [b, h * w, c]
    y.reshape(b, c, h, w)                 without the transpose back: which channels meet follows from h * w

The graph is run on labels at two sizes. Everything that is sliced (slots of parameters, channels of tensors) must
be in the same units in both runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smcp_fx.channels.labels import narrow_uniform, varied_dims
from smcp_fx.channels.trail import EMPTY, Reason, Trail
from smcp_fx.channels.units import Units, Why
from smcp_fx.tracing.trees import leaves_of

Run = tuple[Trail, Units]

DEPENDS = "depends on the size of the images, or on how many there are"


def keep_unsteady(one: Run, other: Run) -> tuple[Units, str]:
    """The first run's units, with a pin on those that the second run ties differently or pins.

    Also returns the first node at which the runs tie differently, or "".
    """
    units = one[1]
    count = int(units.unit.max()) + 1
    pairs = torch.unique(torch.cat([*_pairs(one, other)]))
    mine, theirs = (pairs >> 32) - 1, (pairs & 0xFFFFFFFF) - 1
    partners = torch.bincount(mine[mine >= 0], minlength=count) > 1
    shared = torch.bincount(theirs[(mine >= 0) & (theirs >= 0)]) > 1
    unsteady = partners.clone()
    unsteady[mine[(mine >= 0) & ((theirs < 0) | shared[theirs.clamp(min=0)])]] = True
    pinned = units.why.pinned(count)
    newly_pinned = (unsteady & ~pinned).nonzero().flatten()
    why, where = units.why, ""
    if newly_pinned.numel():
        where = _where(one, other, newly_pinned)
        why = why.and_also(newly_pinned, Reason(where, f"which channels meet at {where!r} {DEPENDS}"))
    else:  # perhaps all channels are tied, at both sizes
        where = _spread_over_space(one, other, why.only(EMPTY, count))
    return Units(units.unit, _also_pinned(why, unsteady | pinned, mine, theirs, other)), where


def _also_pinned(why: Why, pinned_here: Tensor, mine: Tensor, theirs: Tensor, other: Run) -> Why:
    """The reasons ``why``, and those that arise only at the other size."""
    reasons = other[1].why
    pinned = reasons.pinned(int(other[1].unit.max()) + 1)
    new = (mine >= 0) & (theirs >= 0) & ~pinned_here[mine.clamp(min=0)] & pinned[theirs.clamp(min=0)]
    for unit, its in zip(mine[new].tolist(), theirs[new].tolist(), strict=True):
        reason = reasons.get(its)[0]
        other_size = reason._replace(text=f"{reason.text}, at another size of the images")
        why = why.and_also(torch.tensor([unit]), other_size)
    return why


def _pairs(one: Run, other: Run) -> Iterator[Tensor]:
    """Units of the same slots or channels in both runs: 32 bits each, their numbers plus one."""
    (trail, units), (trail2, units2) = one, other
    for name, slots in trail.slots.items():
        for dim, labels in slots.items():
            if dim in trail2.slots.get(name, {}):
                yield _pair(units.of(labels), units2.of(trail2.slots[name][dim]))
    for name, labels in trail.elements.items():
        if name in trail2.elements:
            yield _pair(units.of(labels), units2.of(trail2.elements[name]))
    for _, before, after in _tensors(one, other):
        if _comparable(before := units.of(before), after := units2.of(after)):
            yield _pair(before, after)


def _tensors(one: Run, other: Run) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Labels of every tensor outside shuffles, in both runs, in the order of the graph."""
    for name, tree in one[0].labels.items():
        if name in one[0].virtual or name in other[0].virtual:
            continue
        both = (leaves_of(tree), leaves_of(other[0].labels[name]))
        for before, after in zip(*both, strict=False):
            if isinstance(before, Tensor) and isinstance(after, Tensor) and before.dim() == after.dim():
                yield name, before, after


def _comparable(before: Tensor, after: Tensor) -> bool:
    """Has every dimension along which either varies the same size in both?"""
    varied = {*varied_dims(before), *varied_dims(after)}
    return all(before.shape[dim] == after.shape[dim] for dim in varied)


def _pair(before: Tensor, after: Tensor) -> Tensor:
    """Pair the units of two tensors of one shape, element by element."""
    return ((narrow_uniform(before) + 1 << 32) | (narrow_uniform(after) + 1)).reshape(-1)


def _spread_over_space(one: Run, other: Run, stuck: Tensor) -> str:
    """The first tensor with any of these units along a dimension whose size differs between the runs."""
    for name, before, after in _tensors(one, other) if bool(stuck.any()) else ():
        if not _comparable(before, after) and bool(
            stuck[(units := one[1].of(narrow_uniform(before)))[units >= 0]].any()
        ):
            return name
    return ""


def _where(one: Run, other: Run, unsteady: Tensor) -> str:
    """The first tensor that holds any of these units and whose labels differ between the runs."""
    last = ""
    for name, before, after in _tensors(one, other):
        core, core2 = narrow_uniform(before), narrow_uniform(after)
        if not bool(torch.isin(one[1].of(core), unsteady).any()):
            continue
        last = name
        if len(varied_dims(before)) > 1 or len(varied_dims(after)) > 1:
            return name
        if _comparable(before, after) and not torch.equal(*torch.broadcast_tensors(core, core2)):  # type: ignore[no-untyped-call]
            return name
    return last
