"""Names of modules and tensors that the code made from a graph cannot hold.

`torch.fx` writes a graph as Python source, with names put into it as they are: `self.for` is no Python, and a name
with a quote in it ends a string and goes on as code.
"""

from __future__ import annotations

import keyword

from torch import fx

from smcp_fx.errors import TraceError


def check_names(graph: fx.Graph) -> None:
    """Raise `TraceError` for a path in the graph that would not be plain data in the generated source."""
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        for name in str(node.target).split("."):
            quoted = not name.isidentifier()  # written as getattr(owner, "name")
            unfit = (
                any(c in '"\\{}' or not c.isprintable() for c in name) if quoted else keyword.iskeyword(name)
            )
            if unfit:
                what = (
                    "holds quotes, backslashes, braces or line breaks" if quoted else "is a keyword of Python"
                )
                raise TraceError(
                    f"the name {name!r}, in {str(node.target)!r}, {what}, and the code that is made from a graph "
                    "cannot hold it: rename it."
                )
