"""What a user may ask of the channel graph: groups, permitted counts, explanations, the drawn graph."""

from __future__ import annotations

import inspect
import io

import models_movement  # noqa: F401  (registers its networks)
import models_shapes  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from models import AWKWARD, Net, Residual, between, chain, conv, random_masks, randomise, run
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.groups import permitted_counts
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InputError

IMAGE = torch.zeros(2, 3, 8, 8)


def graph_of(model: nn.Module, **options: object) -> ChannelGraph:
    config = MethodConfig(**{"multiple": 1, "batch_norm_scaling": True, **options})  # type: ignore[arg-type]
    return smcp_fx.prepare(model.eval(), IMAGE, config=config).channels


def concat_of_two() -> nn.Module:
    return Net(
        lambda s, x: s.out(torch.cat([h := s.one(x), F.relu(s.mid(h))], 1)),
        one=conv(3, 8),
        mid=conv(8, 6),
        out=conv(14, 4),
    )


def test_groups_of_a_residual_network() -> None:
    graph = graph_of(Residual(16, 24))
    found = {g.name: (g.size, g.free, g.producers, g.consumers) for g in graph.groups}
    assert found == {
        "input of stem.0": (3, False, (), ("stem.0",)),
        "stem.0": (16, True, ("stem.0", "conv2", "conv4"), ("conv1", "conv3", "fc")),
        "conv1": (24, True, ("conv1",), ("conv2",)),
        "conv3": (24, True, ("conv3",), ("conv4",)),
        "fc": (5, False, ("fc",), ()),
    }
    assert graph["input of stem.0"].pinned == ("network input 'x'",)
    assert graph["fc"].pinned == ("reaches the network's output",)


def test_reasons_name_the_output_of_several() -> None:
    """So that a user sees which one to leave out."""
    net = Net(
        lambda s, x: {"logits": s.out(s.stem(x)), "features": (s.stem(x),)}, stem=conv(3, 8), out=conv(8, 4)
    )
    graph = smcp_fx.prepare(net, torch.randn(1, 3, 8, 8)).channels
    assert graph["stem"].pinned == ("reaches the network's output 'features'",)
    assert graph["out"].pinned == ("reaches the network's output 'logits'",)


def test_groups_of_a_concat_stay_apart() -> None:
    graph = graph_of(concat_of_two())
    assert {g.name: (g.size, g.consumers) for g in graph.groups if g.free} == {
        "one": (8, ("mid", "out")),
        "mid": (6, ("out",)),
    }
    width = graph.width(graph.layers[-1].in_labels)
    assert width.channels({"one": 3, "mid": 2}) == 5


def test_every_slot_is_in_exactly_one_unit_and_every_unit_in_one_group() -> None:
    for model in (
        Residual(),
        concat_of_two(),
        between(lambda s, h: s.mid(h), 12, mid=conv(12, 12, groups=3)),
    ):
        graph = graph_of(model)
        members = torch.cat([group.units for group in graph.groups])
        assert members.unique().numel() == members.numel()
        for layer in graph.layers:
            for labels in (layer.input_channels, layer.output_channels):
                units = graph.units.of(labels)
                assert torch.isin(units[units >= 0], members).all()
                assert bool((units >= 0).all())


@pytest.mark.parametrize(
    ("size", "per_unit", "multiple", "expected"),
    [
        (24, [1, 1], 8, (8, 16, 24)),
        (20, [1], 8, (8, 16, 20)),
        (8, [1], 8, (8,)),
        (4, [1], 8, (4,)),
        (6, [1, 1], 1, (1, 2, 3, 4, 5, 6)),
        (8, [4, 2], 8, (4, 8)),
        (8, [3], 8, (8,)),
        (12, [2, 3], 12, (12,)),
        (5, [16], 8, (1, 2, 3, 4, 5)),
    ],
)
def test_permitted_counts(size: int, per_unit: list[int], multiple: int, expected: tuple[int, ...]) -> None:
    """Multiples of ``multiple`` channels at every producer and consumer, the full size, and never none."""
    found = permitted_counts(size, per_unit, multiple)
    assert found == expected
    assert all(count * channels % multiple == 0 for count in found[:-1] for channels in per_unit)


def test_excluded_modules_stay() -> None:
    graph = graph_of(Residual(), exclude=("conv1",))
    assert graph["conv1"].pinned == ("excluded by the user ('conv1')",)
    assert graph["conv3"].free and graph["stem.0"].free
    assert graph_of(Residual(), exclude=("stem",))["stem.0"].pinned  # a module stands for what it holds
    with pytest.raises(InputError, match=r"'conv9' is not a convolution.*stem\.0, conv1"):
        graph_of(Residual(), exclude=("conv9",))


def test_the_first_convolution_can_be_kept() -> None:
    assert not graph_of(chain(8, 8), keep_first_convolution=True)["0.0"].free
    assert graph_of(chain(8, 8), keep_first_convolution=True)["1.0"].free
    assert graph_of(chain(8, 8))["0.0"].free


def test_explanations() -> None:
    graph = graph_of(concat_of_two())
    text = graph.explain("one", 3)
    assert "output channel 3 of 'one' belongs to group 'one'" in text and "It is free" in text
    assert "input channel 3 of 'mid'" in text and "input channel 3 of 'out'" in text
    text = graph.explain("out", 9, "in")
    assert "belongs to group 'mid'" in text and "output channel 1 of 'mid'" in text
    text = graph.explain("out", 0)
    assert "It must stay" in text and "reaches the network's output" in text
    with pytest.raises(InputError, match="'nowhere' is not a convolution"):
        graph.explain("nowhere", 0)
    with pytest.raises(InputError, match="has 14 input channels; 14 is not one"):
        graph.explain("out", 14, "in")


def sums_along_channels(s: nn.Module, h: Tensor) -> Tensor:
    y = h.clone()
    for i in range(1, 8):
        y[:, i] = y[:, i - 1] + h[:, i]
    return y


def test_channels_tied_into_one_unit_name_the_nodes_that_tie_them() -> None:
    """One reason with the line of the model's code, instead of every tensor that would be empty."""
    text = graph_of(between(sums_along_channels)).explain("stem", 2)
    line = inspect.getsourcelines(sums_along_channels)[1] + 3
    tied = "leave 'stem' empty: all its 8 channels go together, tied from 'add' to 'add_6'"
    assert f"{tied} (at 'add' in test_channel_graph.py, line {line})\nWith it stay:\n" in text
    assert text.count("empty") == 1
    grouped = next(case for case in AWKWARD if case.name == "shuffle_between_grouped").build()
    assert "tied from 'one' to 'two' (at 'one' in" in graph_of(grouped).explain("one", 0)
    both = graph_of(between(lambda s, h: h + h.flip(1), 2)).explain("stem", 0)
    assert "all its 2 channels go together, tied at 'add' (at 'add' in" in both


def test_reasons_name_operations_as_the_network_calls_them_and_are_logged_with_their_rule(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("DEBUG", "smcp_fx.channels"):
        graph = graph_of(between(lambda s, h: torch.fft.rfft(h, dim=1).abs(), 8, 5))
    assert graph["stem"].pinned == ("channels are mixed by 'fft_rfft'",)
    found = [record for record in caplog.records if "mixed by" in record.message]
    assert found and all("rules_spectra.py" in str(record.stack_info) for record in found)


def test_groups_that_the_multiple_leaves_no_choice_are_told_apart() -> None:
    def some(s: nn.Module, h: Tensor) -> Tensor:
        return h[:, [3, 1, 5, 0, 2, 7, 3]]

    graph = graph_of(between(some, 8, 7), multiple=8)
    assert "3 of them free (0 with a choice of counts, in multiples of 8); 100.0%" in repr(graph)
    assert "It is free (the multiple leaves no other count). With it go:" in graph.explain("stem", 2)
    assert "it may go (the multiple leaves no other count)" in graph.summary()
    free = graph_of(between(some, 8, 7))
    assert "3 of them free (2 with a choice of counts, in multiples of 1); 100.0%" in repr(free)
    assert "choice" not in repr(graph_of(concat_of_two()))


def test_unknown_groups_are_named() -> None:
    with pytest.raises(InputError, match="no group 'nine'; the network has 4"):
        graph_of(concat_of_two())["nine"]


def test_the_graph_as_networkx_exports() -> None:
    import networkx as nx

    graph = graph_of(concat_of_two()).graph
    assert set(graph.successors("one")) == {"group:one"}
    assert set(graph.successors("group:one")) == {"mid", "out"}
    assert graph.edges["group:mid", "out"]["channels"] == 1
    assert graph.nodes["group:out"]["pinned"] == "reaches the network's output"
    assert graph.nodes["group:one"]["size"] == 8 and graph.nodes["group:one"]["pinned"] == ""
    written = io.BytesIO()
    nx.write_graphml(graph, written)
    written.seek(0)
    assert set(nx.read_graphml(written).edges) == set(graph.edges)


def test_an_operation_without_a_rule_pins_what_it_touches() -> None:
    graph = graph_of(between(lambda s, h: torch.cumprod(h, 1)))
    group = graph["stem"]
    assert not group.free and any("cumprod" in why for why in group.pinned)
    assert "cumprod" in graph.explain("stem", 2)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")
@pytest.mark.parametrize(("rank", "pinned"), [(4, True), (3, False)])
def test_a_softmax_without_a_dimension_takes_the_one_torch_takes(rank: int, pinned: bool) -> None:
    """The second, except of one or three dimensions the first: the batch."""
    graph = graph_of(between(lambda s, h: F.softmax(h.flatten(2) if rank == 3 else h).view(h.shape)))
    assert graph["stem"].free is not pinned


def test_a_form_that_no_rule_fits_pins_with_the_reason() -> None:
    """A `view` as another type is none of sizes; `prepare` goes on."""
    graph = graph_of(between(lambda s, h: h * h.view(torch.int32).view(torch.float32).sigmoid()))
    assert graph["stem"].pinned and "no channel rule fits this form of 'view'" in graph["stem"].pinned[0]


def test_channel_counts_used_as_numbers_at_another_resolution() -> None:
    """`h / (c * y * x)` keeps its ``c``, and follows ``y`` and ``x`` and the batch."""
    case = next(case for case in AWKWARD if case.name == "divided_by_the_number_of_elements")
    model = randomise(case.build()).double().eval()
    prepared = smcp_fx.prepare(model, case.inputs()[0].double(), config=smcp_fx.PruningConfig(multiple=1))
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    for shape in ((3, 3, 12, 10), (1, 3, 5, 8)):
        x = (torch.randn(shape, dtype=torch.float64),)
        assert_close(run(sliced, x), run(prepared, x), "slicing", str(shape))


def test_a_called_module_that_is_not_known_keeps_the_weights_it_shares() -> None:
    """A hook makes a module do more than its class says: it stays, and so does its weight in other modules."""

    def wiring(s: nn.Module, h: Tensor) -> Tensor:
        return s.one(F.relu(s.three(F.relu(s.two(h)))))  # type: ignore[no-any-return, operator]

    net = between(wiring, one=conv(8, 8), two=conv(8, 8), three=conv(8, 8))
    net.two.weight = net.one.weight
    net.one.register_forward_hook(lambda module, args, output: output * 2)
    graph = graph_of(net)
    assert {group.name for group in graph.groups if group.free} == set()
