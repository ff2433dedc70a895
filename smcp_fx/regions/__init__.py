"""Models that cannot be traced as a whole: the parts that can, and Python for the rest.

A detection model's top filters boxes, counts images, raises on bad targets: no graph holds that. Its backbone, neck
and heads are ordinary networks. So the model is split into *regions*, the largest submodules that can be traced
(`finding`). To find them, the model is run on the example inputs, and each submodule is traced with the arguments
that it was called with. The code between them stays Python.

    images ─ Python ─►┌ backbone ┐─ features ─►┌ head ┐─ logits ─ Python ─► boxes
                      └──────────┘             └──────┘

For the channel graph, costs and passes all calls of all regions are one graph (`joining`). A region that is called
five times is in it five times, with its weights tied like any shared module's, and counts five times in the cost.
Some tensors go straight from one region into the next: in the example run, Python did nothing with them but ask for
their size. There the two graphs are joined, and channels may go. The same holds if Python hands maps to a module that
cuts boxes out of them, and the result goes straight into a region (`carriers`). Every other tensor that enters or
leaves a region is pinned, with the reason. When the model runs, its own code calls each region as before, and the
region's graph runs in place of its module's forward (`running`).

Two assumptions: every call of a region has the argument structure of the example (else an `InputError` names the
region), and Python code that the example run did not reach reads no tensor that went straight from one region to the
next. The example is run in ``train()`` as well, if the model takes the inputs there (detection models do, if targets
are among them).
"""

from smcp_fx.regions.feeding import joined_inputs
from smcp_fx.regions.finding import Form, Region, find_regions
from smcp_fx.regions.joining import join_regions
from smcp_fx.regions.running import Joined, RegionForward, graph_of, run_by_graphs, runs_in_regions

__all__ = [
    "Form",
    "Joined",
    "Region",
    "RegionForward",
    "find_regions",
    "graph_of",
    "join_regions",
    "joined_inputs",
    "run_by_graphs",
    "runs_in_regions",
]
