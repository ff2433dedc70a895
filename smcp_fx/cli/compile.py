"""smcp-compile: from a model, data and a target to measured files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from smcp_fx.cli.common import CommandParser, consoles, guarded, interruptible, tell, wait_asleep
from smcp_fx.cli.flags import add_backend_options, add_options, chosen, own_options
from smcp_fx.config import PruningConfig

#: A run misses its target if it measures this far above it (a fraction of the dense latency). Chosen, not
#: measured.
MISSED = 0.03

_EXAMPLES = """examples:
  # ResNet-18 on scikit-learn's digits, to 40% of its latency
  smcp-compile --model torchvision:resnet18 --data digits --target 0.4
  # trained weights, half of the latency of single images, ten epochs
  smcp-compile --model torchvision:mobilenet_v2 --weights weights.pth \\
      --data imagefolder:/data/flowers --target 0.5 --epochs 10
  # your own model and data, an absolute target
  smcp-compile --model model.py:build --weights model.safetensors \\
      --data data.py:load --target '12 ms'
  # FLOPs in place of latency
  smcp-compile --model timm:resnet50 --data imagefolder:/data/flowers \\
      --target 0.3 --cost flops
  # without training, by images without labels: a trade-off curve
  smcp-compile --model timm:resnet50 --pretrained \\
      --data images:/data/photos --epochs 0 --targets 0.9,0.7,0.5,0.3
  # for TensorRT
  smcp-compile --model torchvision:resnet50 --data imagefolder:/data \\
      --backend tensorrt --precision fp16 --batch 256
"""


def build_parser() -> CommandParser:
    """Return the command line's parser, made from the settings' dataclasses."""
    from smcp_fx.compiler.settings import CompileSettings

    parser = CommandParser(
        prog="smcp-compile",
        usage="%(prog)s [OPTION ...]",
        description="Make a convolutional network as fast as asked: train it (or take weights), measure what its "
        "layers cost, prune and repair it, train what is left, and emit a smaller ONNX file whose measured latency "
        "is the target.",
        epilog=_EXAMPLES,
    )
    add_options(parser.add_argument_group("the run"), CompileSettings)
    add_backend_options(parser)
    add_options(parser.add_argument_group("the method"), PruningConfig)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = vars(build_parser().parsed(argv))
    console, problems = consoles()
    if not (sys.argv[1:] if argv is None else argv):
        return guarded("smcp-compile", lambda: _usage(console), problems, debug=False)
    if arguments["backend"] != "torch":  # PyTorch is timed with its own defaults
        wait_asleep(argv)
    debug = arguments.pop("debug")
    how_on = "Give the same command again."

    def run() -> int:
        nonlocal how_on
        from smcp_fx.compiler import CompileSettings, compile_model
        from smcp_fx.compiler.folder import how_to_go_on, placed

        own = own_options(arguments["backend"], arguments)
        settings = placed(replace(chosen(CompileSettings, arguments), of_backend=own))
        config = chosen(PruningConfig, arguments)
        try:
            report = compile_model(settings, config, console)
        except KeyboardInterrupt:
            how_on = how_to_go_on(settings, config)
            raise
        measured, asked = report.measured_fraction or 0.0, report.target_fraction or 0.0
        judged = report.table is not None and not report.table.foreign
        if judged and measured - asked > MISSED and not settings.allow_missed:
            tell(
                problems,
                "smcp-compile",
                f"the target was missed: asked for {asked:.1%} of the dense latency, measured "
                f"{measured:.1%}. The files are written; run again on a quieter machine, or ask "
                "for less.",
            )
            return 3
        return 0

    return guarded(
        "smcp-compile",
        run,
        problems,
        debug=debug,
        interrupted=lambda: how_on,
        advice="Free space or give another --out.",
    )


def _usage(console: Console) -> int:
    console.print(f"{_EXAMPLES}\nsmcp-compile --help lists all options.")
    return 2


if __name__ == "__main__":
    sys.exit(main())
