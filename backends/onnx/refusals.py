"""Why an export was refused: the operation and the module that the exporter stopped at."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import torch


def explain(error: BaseException, program: torch.export.ExportedProgram) -> str:
    """Name the operation and the module behind an exporter's error."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(chain)
    node = re.search(r"translating node %(\w+)", text)
    operation = re.search(r"OpOverload\(op='([\w.]+)'", text) or re.search(
        r"target=torch\.ops\.([\w.]+)", text
    )
    if node is None and operation is None:
        return (
            f"ONNX cannot express the network: {chain[-1].strip().splitlines()[0] if chain[-1] else error!r}"
        )
    module = _module_of(node.group(1), program) if node is not None else None
    # The module is unknown inside a block, or in the network's own forward.
    where = f" in module {module!r}" if module else ""
    name = operation.group(1) if operation is not None else node.group(1) if node is not None else "?"
    return (
        f"ONNX cannot express the operation {name}{where}: the exporter has no translation for it. "
        "Replace it by operations that ONNX has, or leave that module out of the exported network."
    )


def _module_of(node_name: str, program: torch.export.ExportedProgram) -> str | None:
    """Return the path of the module that holds a node; None if the node is not found."""
    # The exporter names nodes of the decomposed program, and fully decomposes untranslatable operations.
    forms: list[Callable[[], torch.export.ExportedProgram]] = [
        lambda: program,
        program.run_decompositions,
        lambda: program.run_decompositions(dict(torch._decomp.decomposition_table)),
    ]
    for form in forms:
        with contextlib.suppress(Exception):
            for node in form().graph.nodes:
                if node.name == node_name and node.meta.get("nn_module_stack"):
                    stack = list(node.meta["nn_module_stack"].values())
                    return str(stack[-1][0])
    return None
