"""Everything smcp_fx raises on purpose.

Each message names what is wrong, where (node, module path, shapes) and what to change. The command lines
print the message as one paragraph and exit with ``exit_code``.
"""

from __future__ import annotations


class SmcpError(Exception):
    """Base of every error of this library; catching it catches them all."""

    exit_code = 2


class InputError(SmcpError, ValueError):
    """An argument does not fit: a shape, a name, a range, a file of the wrong kind."""


class AssumptionError(InputError, AssertionError):
    """An input is of another kind than the example that a prepared model was traced for."""


class TraceError(SmcpError):
    """The model cannot be turned into a graph that computes the same."""


class PassError(SmcpError):
    """A graph pass found its input, or left its output, in a state its contract forbids."""


class InfeasibleBudgetError(SmcpError, ValueError):
    """No permitted choice of channels reaches the budget; ``smallest`` is the least reachable cost."""

    def __init__(self, message: str, *, smallest: float, budget: float) -> None:
        super().__init__(message)
        self.smallest = smallest
        self.budget = budget


class TableError(SmcpError):
    """A latency table is missing, unreadable, of another version, or made on another device or runtime."""


class BackendError(SmcpError):
    """A runtime is missing, refuses the network, or computes something else than PyTorch does."""


class MachineBusyError(BackendError):
    """Other processes keep this machine's cores busy, so nothing can be measured now."""


class CheckpointError(SmcpError):
    """A saved model or checkpoint is missing, damaged or does not belong to this network."""


class TrainingError(SmcpError):
    """Training cannot go on: the loss is not finite, or the pruning loop is used against its contract."""


def is_out_of_memory(error: BaseException) -> bool:
    """Is the cause too little memory, of a processor or a GPU?"""
    words = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, as a sentence."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return line if line.endswith((".", "!", "?")) else line + "."
