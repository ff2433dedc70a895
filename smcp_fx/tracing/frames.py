"""The code that queries a traced tensor: an `isinstance`, a dict look-up, or a call."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from types import CodeType, FrameType

#: Methods by which a key is looked up.
_LOOKUPS = {"get", "add", "setdefault", "pop", "discard", "remove"}


def in_library(frame: FrameType) -> bool:
    """Does the frame run code of torch or of this library, and not of the model?"""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "smcp_fx")


def instruction_of(frame: FrameType) -> dis.Instruction | None:
    """The frame's current instruction."""
    return _instruction(frame.f_code, frame.f_lasti)


def asks_for_type(frame: FrameType) -> bool:
    """Is the frame at `isinstance(...)`, at `x.__class__`, or at a `case` of a class?"""
    instruction = instruction_of(frame)
    if instruction is None or "CALL" not in instruction.opname:
        return instruction is not None and instruction.opname in ("LOAD_ATTR", "MATCH_CLASS")
    called = _called(frame.f_code, frame.f_lasti)
    return isinstance(called, ast.Name) and called.id == "isinstance"


def looks_up(frame: FrameType) -> bool:
    """Does the frame look up a key, itself or by a method of dicts and sets, and call nothing else?"""
    instruction = instruction_of(frame)
    if instruction is None or "CALL" not in instruction.opname:
        return instruction is not None
    called = _called(frame.f_code, frame.f_lasti)
    return isinstance(called, ast.Attribute) and called.attr in _LOOKUPS


@functools.cache
def _instruction(code: CodeType, offset: int) -> dis.Instruction | None:
    return next((step for step in dis.get_instructions(code) if step.offset == offset), None)


@functools.cache
def _called(code: CodeType, offset: int) -> ast.expr | None:
    """The called expression in the source; None if it cannot be read (before Python 3.11)."""
    instruction = _instruction(code, offset)
    place = getattr(instruction, "positions", None)
    if place is None or None in (place.lineno, place.end_lineno, place.col_offset, place.end_col_offset):
        return None
    lines = [
        linecache.getline(code.co_filename, line).encode()
        for line in range(place.lineno, place.end_lineno + 1)
    ]
    lines[-1] = lines[-1][: place.end_col_offset]
    lines[0] = lines[0][place.col_offset :]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None
    return call.func if isinstance(call, ast.Call) else None
