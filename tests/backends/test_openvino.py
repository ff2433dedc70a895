"""OpenVINO: engines, files, and which of a block's nodes are its own."""

from __future__ import annotations

import sys

import numpy as np
import openvino as ov
import pytest
import torch
from fake_blocks import ABlock
from torch import nn

from smcp_fx.backends import get_backend
from smcp_fx.backends.onnx.blocks import BlockModels
from smcp_fx.backends.onnx.context import add_context, random_feed
from smcp_fx.backends.onnx.twin import add_twin
from smcp_fx.backends.openvino import backend as module
from smcp_fx.backends.openvino.backend import OpenVINOEngine
from smcp_fx.backends.openvino.blocks import Parts, _disturbed, spent_in
from smcp_fx.backends.openvino.session import Node, Session
from smcp_fx.backends.timing.measuring import Sample, TimingConfig
from smcp_fx.errors import BackendError, InputError

FAST = TimingConfig(min_repeats=2, max_repeats=3, budget_ms=1, attempts=1, warmup_ms=1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()


def test_the_pair_beside_the_onnx_file_computes_what_the_module_does(tmp_path):
    module_, x = network(), torch.randn(2, 3, 8, 8)
    backend = get_backend("openvino")
    with backend.compile(module_, (x,), tmp_path / "net.onnx") as engine:
        assert backend.files(tmp_path / "net.onnx") == [
            tmp_path / f"net.{end}" for end in ("onnx", "xml", "bin")
        ]
        assert sorted(file.name for file in tmp_path.iterdir()) == ["net.bin", "net.onnx", "net.xml"]
        with torch.no_grad():
            expected = module_(x).numpy()
        assert np.allclose(engine.run([x.numpy()])[0], expected, rtol=1e-4, atol=1e-5)
        assert engine.latency(config=FAST).median_ms > 0
        with pytest.raises(InputError, match="has 1 inputs, 2 were given"):
            engine.run([x.numpy()] * 2)
        with pytest.raises(BackendError, match=r"OpenVINO failed on inputs of shapes \[\(1, 7, 8, 8\)\]"):
            engine.run([np.zeros((1, 7, 8, 8), np.float32)])
    # What a user reads who has OpenVINO alone, with its own default precision switched off.
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    alone = ov.Core().compile_model(tmp_path / "net.xml", "CPU", options)
    assert np.allclose(alone([x.numpy()])[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(BackendError, match="closed"):
        engine.run([x.numpy()])


def test_a_pair_that_computes_something_else_gets_no_name(tmp_path, monkeypatch):
    save = ov.save_model

    def spoilt(network_, file, **options):
        weights = [node for node in network_.get_ops() if node.get_type_name() == "Constant"]
        largest = max(weights, key=lambda node: node.get_data().size)
        other = ov.opset8.constant(2 * largest.get_data())
        for target in largest.output(0).get_target_inputs():
            target.replace_source_output(other.output(0))
        save(network_, file, **options)

    monkeypatch.setattr(module.ov, "save_model", spoilt)
    with pytest.raises(BackendError, match="OpenVINO computes"):
        get_backend("openvino").compile(network(), (torch.randn(2, 3, 8, 8),), tmp_path / "net.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]


def test_settings_and_precision_tell_fingerprints_apart():
    prints = [get_backend("openvino", **options).fingerprint() for options in ({}, {"threads": 2})]
    assert prints[0].version.startswith("20")
    assert prints[0].precision == "fp32"
    assert dict(prints[0].settings)["inference_precision_hint"] == "f32"
    assert len({fingerprint.key() for fingerprint in prints}) == 2
    with pytest.raises(InputError, match="threads = 0"):
        get_backend("openvino", threads=0)
    with pytest.raises(InputError, match=r"precision 'fp8': OpenVINO computes in fp32, bf16, fp16"):
        get_backend("openvino", precision="fp8")


def test_a_precision_that_the_processor_lacks_is_refused(monkeypatch):
    from smcp_fx.backends.openvino import session

    class Plain:
        def get_property(self, *_: str) -> list[str]:
            return ["FP32", "INT8"]

    monkeypatch.setattr(session, "core", Plain)
    with pytest.raises(BackendError, match="this processor has no instructions for it"):
        get_backend("openvino", precision="bf16")


def test_the_missing_package_gives_the_line_that_installs_it(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("smcp_fx.backends.openvino")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(BackendError, match="'openvino', which is not installed: pip install openvino"):
        get_backend("openvino")


def test_files_that_are_no_networks_are_refused(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        OpenVINOEngine(tmp_path / "none.xml")
    (tmp_path / "bad.xml").write_text("nonsense")
    with pytest.raises(BackendError, match=r"refuses .*bad\.xml"):
        OpenVINOEngine(tmp_path / "bad.xml")


def test_the_blocks_nodes_are_told_from_context_and_twin():
    """A convolution, a sum and an activation run as one node, whose time grows; all others are context."""
    model = BlockModels().model(ABlock("conv", size=16), (16, 48))
    add_twin(add_context(model))
    session = Session(model.SerializeToString(), counts=True)
    session.feed(list(random_feed(model).values()))
    for _ in range(3):
        session.run()
    spent, parts = session.spent(), Parts.of(session.nodes())
    (first,), (second,) = (
        [node for node in part if spent.get(node.name, 0.0) > 0] for part in parts.counted("hot")
    )
    assert {"conv", "node_add", "node_relu"} <= {layer.removesuffix("_smcp_twin") for layer in first.layers}
    assert sorted([first.name, second.name]) == ["conv", "conv_smcp_twin"]
    assert parts.counted("cold") == parts.counted("hot")[-1:]
    assert 0 < parts.ms(spent, 0.0, "hot") < sum(spent.values())
    assert parts.ms(spent, 1.0, "hot") == pytest.approx(parts.ms(spent, 0.0, "hot") + 1)


def test_a_conversion_is_its_readers():
    nodes = [
        Node("smcp_context_x", ("smcp_context_x",), ("smcp_context_x_abcd_acdb_conv",)),
        Node("smcp_context_x_abcd_acdb_conv", (), ("conv",)),
        Node("conv", ("conv", "relu"), ("conv_acdb_abcd_smcp_context_y",)),
        Node("conv_acdb_abcd_smcp_context_y", (), ("smcp_context_y",)),
        Node("smcp_context_y", ("smcp_context_y",), ()),
    ]
    spent = {node.name: float(2**place) for place, node in enumerate(nodes)}
    assert Parts.of(nodes).ms(spent, 0.0, "hot") == 2 + 4
    assert Parts.of(nodes, paid=0.5).ms(spent, 0.0, "hot") == 1 + 4  # another block has paid for half of it


def test_a_block_is_measured_hot_and_cold():
    backend = get_backend("openvino")
    latency = backend.block_latency(ABlock("conv"), (16, 16), FAST)
    assert latency.hot.median_ms > 0
    assert latency.cold is not None
    assert latency.cold.median_ms > 0


def test_means_of_some_runs_come_out_whole_wherever_the_others_lie():
    took = [50.0, 1.0, 9.0, 2.0, 3.0, 9.0]
    history = [{"a": sum(took[: end + 1])} for end in range(len(took))]
    assert spent_in(history, [0, 2, 3]) == {"a": 2.0}
    assert spent_in(history, [1]) == {"a": 9.0}


def test_disturbed_runs_tell_what_the_thread_computed():
    """Others had the core for 5 ms in the block, then for 5 ms in the context: both times the block took 4 ms."""
    parts = Parts((Node("conv", ("conv",), ()),), 0.0)
    runs = [{"conv": 9.0, "context": 1.0}, {"conv": 4.0, "context": 6.0}]
    history = [{"conv": 0.0, "context": 0.0}]
    for run in runs:
        history.append({name: history[-1][name] + ms for name, ms in run.items()})
    samples = [Sample(5.0, disturbed=True)] * 2
    (told,) = _disturbed(history[:2], samples[:1], parts, 0.0, "hot")
    assert told.ms == 5.0  # at most: how much of it the context took is not known
    calm = [{"conv": 4.0, "context": 1.0}]
    history.append({name: history[-1][name] + ms for name, ms in calm[0].items()})
    found = [sample.ms for sample in _disturbed(history, [*samples, Sample(5.0)], parts, 0.0, "hot")]
    assert found == [5.0, 4.0, 4.0]
