"""Names of modules and tensors in the code that is generated from a graph: any name is allowed.

`torch.fx` writes names into Python source as they are, but `self.for` is not valid Python, and a name with a quote in
it ends a string and continues as code. Here such names are written as strings: `getattr(self, 'for')`.
"""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import fx


def holds_unfit_names(graph: fx.Graph) -> bool:
    """Does the graph call or read a module or tensor whose name torch.fx would write wrongly?"""
    targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    return any(not _fit(name) for target in targets for name in target.split("."))


def _fit(name: str) -> bool:
    if name.isidentifier():  # Python folds letters of identifiers, but not of strings
        return not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return name.isprintable() and not set(name) & set('"\\')  # written in double quotes


def _written(base: str, target: str) -> str:
    for name in target.split("."):
        if not _fit(name):
            base = f"getattr({base}, {name!a})"
        else:
            base = f"{base}.{name}" if name.isidentifier() else f'getattr({base}, "{name}")'
    return base


@contextmanager
def any_names() -> Iterator[None]:
    """While it is entered, torch.fx writes unusual names as data, and others as before."""
    with mock.patch.object(torch.fx.graph, "_format_target", _written):
        yield
