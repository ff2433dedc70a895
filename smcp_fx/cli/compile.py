"""smcp-compile: from a model, data and a target to measured files."""

from __future__ import annotations

import argparse
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from smcp_fx.cli.common import CommandParser, consoles, guarded, tell
from smcp_fx.config import PruningConfig

#: Measured this far above the target (a fraction of the dense latency), the run counts as missed.
MISSED = 0.03

_EXAMPLES = """examples:
  smcp-compile --model torchvision:resnet18 --data digits                     40 % of its latency, on the digits
  smcp-compile --model torchvision:mobilenet_v2 --target 0.5 --epochs 10
  smcp-compile --model model.py:build --weights model.safetensors --data data.py:load --target '12 ms' --batch 1
  smcp-compile --model torchvision:resnet50 --backend tensorrt --precision fp16 --batch 256
  smcp-compile --data imagefolder:/data/flowers --model timm:resnet50 --target 0.3 --cost flops
"""


def add_options(parser: argparse._ArgumentGroup, kind: type) -> None:
    """Add a flag for each field of a config dataclass, with its default and its help."""
    hints = typing.get_type_hints(kind)
    for entry in fields(kind):
        flag = "--" + entry.name.replace("_", "-")
        help_text = str(entry.metadata.get("help", "")).replace("%", "%%")
        default = _default(entry)
        shown = "" if default in (None, (), False, True) else f" (default: {default})".replace("%", "%%")
        if hints[entry.name] is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            parser.add_argument(flag, action=action, default=default, help=help_text)
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs="*", default=default, help=help_text, metavar="NAME")
        else:
            choices = entry.metadata.get("choices") or None
            parser.add_argument(
                flag,
                type=_plain_type(hints[entry.name]),
                default=default,
                choices=choices,
                help=help_text + shown,
                metavar=None if choices else entry.name.upper(),
            )


def _default(entry: Field[Any]) -> Any:
    return None if entry.default is MISSING else entry.default


def _plain_type(hint: Any) -> Any:
    """The callable that parses a flag of this type: `float | None` is a float, a Literal a string."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint if hint in (int, float, str) else str


def build_parser() -> CommandParser:
    """The command line, derived from the settings' dataclasses."""
    from smcp_fx.compiler.settings import CompileSettings

    parser = CommandParser(
        prog="smcp-compile",
        description="Make a convolutional network as fast as asked: train it (or take weights), measure what its "
        "layers cost, prune it while it trains, and emit a smaller ONNX file whose measured latency is the target.",
        epilog=_EXAMPLES,
    )
    add_options(parser.add_argument_group("the run"), CompileSettings)
    add_options(parser.add_argument_group("the method"), PruningConfig)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 2
    arguments = vars(parser.parsed(argv))
    debug = arguments.pop("debug")
    console, problems = consoles()
    where = {"state": "runs/"}

    def run() -> int:
        from smcp_fx.compiler import CompileSettings, compile_model
        from smcp_fx.compiler.folder import placed

        settings = placed(
            CompileSettings(**{f.name: _as_field(arguments[f.name]) for f in fields(CompileSettings)})
        )
        where["state"] = str(settings.folder / "state")
        config = PruningConfig(**{f.name: _as_field(arguments[f.name]) for f in fields(PruningConfig)})
        report = compile_model(settings, config, console)
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
        interrupted=lambda: f"Go on with the same command and --resume (state in {where['state']}).",
        advice="Free space or give another --out.",
    )


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
