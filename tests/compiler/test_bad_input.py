"""What the compile command says to bad input: one paragraph, before anything is trained or written."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_compile import arguments

from smcp_fx.cli.compile import main


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--model", "torchvision:resnet181"], "no classification model 'resnet181'"),
        (["--model", "resnet18"], "torchvision:NAME"),
        (["--model", "nowhere.py:build"], "no file"),
        (["--model", "{file}:absent"], "defines no function 'absent'"),
        (["--model", "{file}:Branching"], "tiny_model.py:20"),
        (
            ["--model", "{file}:NotANumber", "--cost", "flops", "--backend", "torch"],
            "the loss is nan at step 1",
        ),
        (
            ["--model", "{file}:Inexpressible", "--dense-epochs", "1"],
            "cannot express the operation prims.bessel_i1 in module 'head'",
        ),
        (["--data", "imagefolder:/nowhere"], "train/"),
        (["--data", "cifar"], "digits"),
        (["--target", "0"], "(0, 1]"),
        (["--target", "12 GB"], "is not a cost in ms"),
        (["--target", "0.0001", "--cost", "flops"], "smallest reachable cost"),
        (["--exclude", "nonsense"], "'nonsense'"),
        (["--multiple", "0"], "multiple"),
        (["--weights", "/nowhere.pt"], "no weights"),
        (["--weights", "{file}"], "cannot be read as weights"),
        (["--table", "{file}"], "no latency table, or a damaged one"),
        (["--resume"], "no run to resume"),
        (["--train-batch", "5000"], "--train-batch 5000"),
        (["--out", "/proc/nowhere", "--cost", "flops", "--backend", "torch"], "cannot write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_paragraph(
    model_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    out = tmp_path / "out"
    flags = [flag.replace("{file}", model_file) for flag in more]
    assert main([*arguments(f"{model_file}:build", out), *flags]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown
    assert "Traceback" not in shown
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".onnx", ".part", ".safetensors")]
    assert more != ["--resume"] or not out.exists()


def test_unknown_backends_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--backend", "abacus"])
    assert stopped.value.code == 2
    assert "'abacus'" in capsys.readouterr().err
