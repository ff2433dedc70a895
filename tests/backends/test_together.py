"""Models cut out of one export compute what their modules do."""

from __future__ import annotations

import onnx
import onnxruntime as ort
import pytest
import torch
from tolerances import assert_close
from torch import Tensor, nn

from smcp_fx.backends.onnx.together import export_side_by_side, path_of
from smcp_fx.errors import BackendError


class Adds(nn.Module):
    """Two inputs, two outputs; the second output is also what the first is made of."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.relu(self.conv(x))
        return z + y, z


class Halves(nn.Module):
    """Moves channels by constants."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(x, [2, 4], 1)
        return torch.cat([b, a], 1).flatten(1)


def modules() -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU()).eval()
    return [
        (normed, (torch.randn(2, 4, 6, 6),)),
        (Adds(5), (torch.randn(1, 5, 4, 4), torch.randn(1, 5, 4, 4))),
        (Halves(), (torch.randn(3, 6, 2, 2),)),
        (Adds(5), (torch.randn(1, 5, 4, 4), torch.randn(1, 5, 4, 4))),
        (nn.Linear(7, 3), (torch.randn(2, 7),)),
    ]


def test_each_model_is_its_modules_alone() -> None:
    found = export_side_by_side(modules(), [1, 2, 1, 2, 1])
    for index, (model, (module, inputs)) in enumerate(zip(found, modules(), strict=True)):
        onnx.checker.check_model(model, full_check=True)
        assert len(model.graph.input) == len(inputs)
        weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) > 1}
        assert all(name.startswith(path_of(index, "")) for name in weights), weights
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        outputs = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
        with torch.no_grad():
            expected = module(*inputs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert_close(tuple(torch.from_numpy(x) for x in outputs), tuple(expected), "slicing", str(index))


def test_a_module_that_onnx_cannot_express_is_told() -> None:
    class Svd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x)

    with pytest.raises(BackendError, match="linalg_svd"):
        export_side_by_side([*modules(), (Svd(), (torch.randn(2, 3, 3),))], [1, 2, 1, 2, 1, 1])
