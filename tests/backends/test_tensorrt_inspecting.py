"""What engine inspectors of several versions say about layers, and how it is read."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from fake_tensorrt import built, pretend, small_model

from smcp_fx.backends.tensorrt.worker import inspecting
from smcp_fx.backends.tensorrt.worker.client import InProcess

FP16 = onnx.TensorProto.FLOAT16


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Row major linear FP32", "fp32"), ("Float", "fp32"),
        ("Channel major FP16 format where channel % 8 == 0", "fp16"),
        ("Half", "fp16"), ("BF16", "bf16"), ("BFloat16", "bf16"), ("Int8", "int8"), ("Int32", "int"), ("N/A", None),
    ],
)  # fmt: skip
def test_types_of_all_versions_are_understood(words: str, kind: str | None) -> None:
    assert inspecting.type_of(words) == kind
    for tensor in (
        {"Format/Datatype": words},
        {"Name": "Half float", "Format": "Channel major", "DataType": words},
    ):
        assert inspecting.layer_type({"LayerType": "CaskConvolution", "Inputs": [tensor]}) == kind


def test_layers_are_mapped_to_nodes_by_metadata_and_by_name() -> None:
    known = ["conv1", "bn1", "relu", "layer1.0.conv1", "fc"]
    plain = {"Name": "conv1 + bn1 + PWN(relu)", "LayerType": "CaskConvolution"}
    assert inspecting.nodes_of(plain, known) == ["conv1", "bn1", "relu"]
    told = {"Name": "__myl_Fc_myl0_1", "Metadata": "[ONNX Layer: layer1.0.conv1]\x1e[ONNX Layer: fc]"}
    assert inspecting.nodes_of(told, known) == ["layer1.0.conv1", "fc"]
    copy = {"Name": "Reformatting CopyNode for Input Tensor 0 to conv1", "LayerType": "Reformat"}
    assert inspecting.nodes_of(copy, known) == [] and inspecting.is_reformat(copy)
    assert not inspecting.is_product(copy)


def test_json_with_quotes_inside_still_gives_names_and_kinds() -> None:
    text = '{"Name": "conv1", "LayerType": "Conv", "Inputs": [{"Name": "x"}], "Metadata": "{"a": 1}"}'
    assert inspecting.parse_layer(text) == {"Name": "conv1", "LayerType": "Conv"}
    assert inspecting.parse_layers(f'{{"Layers": [{text}], "Bindings": []}}') is None
    assert inspecting.parse_layers('{"Layers": ["conv1", {"Name": "b"}]}') == [
        {"Name": "conv1"},
        {"Name": "b"},
    ]


@pytest.mark.parametrize(
    ("fault", "types", "note"),
    [
        (
            "quotes:conv1",
            {"unknown": 1, "fp16": 1},
            "the inspector gives no type for 1 convolutions and products",
        ),
        ("fused", {}, "the inspector shows none of the network's 2 convolutions and products"),
    ],
)
def test_what_inspectors_do_not_tell_is_said(
    fault: str, types: dict[str, int], note: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, "10.16.1.11", FAKE_FAULT=fault)
    told = built(InProcess(), small_model(tmp_path / "m.onnx", FP16), precision="fp16")
    assert told["types"] == types and len(told["notes"]) == 1 and told["notes"][0].startswith(note)


def test_a_fused_product_is_known_by_its_kernel() -> None:
    layer = {"Name": "fusion_1", "LayerType": "fusion", "TacticName": "sm90_xmma_gemm_f32f32_tn_n"}
    tensors = [{"Name": "x", "Format": "Row major linear FP16 format", "DataType": "Float"}]
    assert inspecting.count_types([{**layer, "Inputs": tensors}]) == {"fp32": 1}
    assert inspecting.count_types([{**layer, "TacticName": "__myl_AddRelu"}]) == {}
