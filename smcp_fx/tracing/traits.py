"""Traits of operations by name: one table for tracing, the channel rules and the passes.

Names are those of `operation_name`. Nothing is assumed about an operation that is not in the table.
"""

from __future__ import annotations

import functools
from enum import Flag, auto


class Trait(Flag):
    """What an operation does with the elements of its operands."""

    #: Puts elements into other places and changes none; the result may be a view of the operand.
    MOVES = auto()
    #: Moves, and the result is always a tensor of its own.
    COPIES = auto()
    #: Moves by merging or splitting dimensions, so that sizes may decide which channels meet.
    REGROUPS = auto()
    #: Moves by merging or splitting dimensions, with sizes of its own.
    RESHAPES = auto()
    #: Moves by giving dimensions another order.
    PERMUTES = auto()
    #: Puts several tensors into one.
    JOINS = auto()
    #: Adds elements at the ends of dimensions.
    PADS = auto()
    #: Computes each element from the operands' elements at the same place, after broadcasting.
    ELEMENTWISE = auto()
    #: Makes a tensor of one value, of the sizes given.
    FILLS = auto()
    #: Element-wise, and the result is random or uninitialised.
    DRAWN = auto()
    #: Returns the operand itself, always or in some mode or for some type.
    SAME = auto()
    #: Does not count as moving, but the result is a view of the operand's memory.
    VIEWS = auto()
    #: Asks for a tensor's sizes and type, which masks do not change, or for a mode.
    ASKS = auto()


_NAMES = {
    Trait.MOVES: """
        atleast2d broadcastto channelshuffle chunk contiguous diagonal expand expandas flatten flip getitem
        indexselect movedim narrow permute pixelshuffle pixelunshuffle repeat repeatinterleave reshape reshapeas
        roll rot90 select split splitwithsizes squeeze t tensorsplit tile transpose unbind unflatten unsafechunk
        unsafesplit unsqueeze view viewas
    """,
    Trait.COPIES: """
        channelshuffle flip indexselect pixelshuffle pixelunshuffle repeat repeatinterleave roll rot90 tile
    """,
    Trait.REGROUPS: "flatten reshape reshapeas unflatten view viewas",
    Trait.RESHAPES: "flatten reshape unflatten view",
    Trait.PERMUTES: "movedim permute t transpose",
    Trait.JOINS: "cat hstack stack vstack",
    Trait.PADS: """
        pad constantpad1d constantpad2d constantpad3d reflectionpad1d reflectionpad2d reflectionpad3d
        replicationpad1d replicationpad2d replicationpad3d zeropad1d zeropad2d zeropad3d
    """,
    Trait.ELEMENTWISE: """
        abs acos acosh add addcdiv addcmul alphadropout angle asarray asin asinh astensor atan atan2 atanh
        bernoulli bfloat16 bitwiseand bitwisenot bitwiseor bool byte ceil celu clamp clone complex conj
        conjphysical copy copysign cos cosh detach div double dropblock2d dropblock3d dropout dropout1d
        dropout2d dropout3d elu emptylike eq equal erf erfc exp exp2 expm1 fakequantizepertensoraffine
        featurealphadropout fill float floor floordiv floordivide fmax fmin fmod frac fulllike ge gelu gt half
        hardshrink hardsigmoid hardswish hardtanh heaviside hypot identity imag int invert isfinite isinf isnan
        le leakyrelu lerp log log10 log1p log2 logaddexp logicaland logicalnot logicalor logicalxor logit
        logsigmoid long lt maskedfill maximum minimum mish mod mul nantonum ne neg oneslike overwritten polar
        pos positive ownelementwise pow randlike randnlike real reciprocal relu relu6 remainder resolveconj
        round rrelu rsqrt selu sgn short sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt
        square stochasticdepth sub swish tan tanh tanhshrink threshold to trunc type typeas where xlogy zero
        zeroslike
    """,
    Trait.FILLS: "empty full newempty newfull newones newzeros ones zeros",
    Trait.DRAWN: "bernoulli emptylike randlike randnlike rrelu",
    Trait.SAME: """
        alphadropout asarray astensor bfloat16 bool byte detach double dropblock2d dropblock3d dropout dropout1d
        dropout2d dropout3d featurealphadropout float half identity int long pos positive short stochasticdepth
        to type typeas
    """,
    Trait.VIEWS: """
        adjoint asstrided dsplit einsum hsplit imag meshgrid ravel real resolveconj resolveneg unfold viewascomplex
        viewasreal vsplit
    """,
    Trait.ASKS: """
        assert bymode dim elementsize getattr getdevice iscomplex iscontiguous isfloatingpoint leftout len
        ndimension nelement numel size type
    """,
}


def _table() -> dict[str, Trait]:
    traits: dict[str, Trait] = {}
    for trait, names in _NAMES.items():
        for name in names.split():
            traits[name] = traits.get(name, Trait(0)) | trait
    return traits


_TRAITS = _table()


@functools.cache
def has(name: str | None, trait: Trait) -> bool:
    """Tell whether the operation has the trait, or one of several."""
    return bool(_TRAITS.get(name or "", Trait(0)) & trait)


def operations_with(trait: Trait) -> frozenset[str]:
    """Return the operations that have the trait, or one of several."""
    return frozenset(name for name in _TRAITS if has(name, trait))
