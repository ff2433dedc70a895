"""smcp-inspect: shows the channels of a model that may be pruned, and why the others must stay."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from smcp_fx.cli.common import CommandParser, consoles, guarded, interruptible
from smcp_fx.errors import InputError

_NO_WRAP = 100_000
_EXAMPLES = """examples:
  # a tree of the groups of channels
  smcp-inspect torchvision:resnet50
  # a module's layers and their groups
  smcp-inspect torchvision:resnet50 --module layer1.0
  # one channel: what goes with it, or why it must stay
  smcp-inspect torchvision:resnet50 --module layer1.0.conv1 --channel 3
  # a page to zoom, move and search
  smcp-inspect timm:convnext_tiny --html convnext.html
  # your own model, on one grey image, for Graphviz
  smcp-inspect model.py:build --input-size 1x128x128 --dot model.dot
"""


def build_parser() -> CommandParser:
    """Return the command line's parser."""
    parser = CommandParser(
        prog="smcp-inspect",
        description="Show the channel graph of a model: which channels must be kept or removed together, how many "
        "may be kept, and what must stay and why.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("model", help="torchvision:NAME, timm:NAME, onnx:FILE, or path/to/file.py:factory")
    parser.add_argument(
        "--input-size",
        metavar="SIZE",
        help="trace with this input: a side (224), or sizes (3x224x224), of several inputs of an ONNX "
        "file with commas",
    )
    parser.add_argument(
        "--multiple", type=int, default=8, help="keep multiples of this many channels (default: 8)"
    )
    parser.add_argument("--exclude", nargs="*", default=[], metavar="NAME", help="modules whose outputs stay")
    parser.add_argument(
        "--widths", nargs="*", default=[], metavar="LIMIT", help="limits, as 'layer4.* >= 50%%'"
    )
    ask = parser.add_argument_group("ask about")
    ask.add_argument("--group", metavar="NAME", help="one group: its members, its counts, what pins it")
    ask.add_argument("--module", metavar="PATH", help="the layers of one module and their groups")
    ask.add_argument("--channel", type=int, metavar="N", help="one channel of the layer that --module names")
    ask.add_argument(
        "--side", choices=("out", "in"), default="out", help="... of its outputs (default) or inputs"
    )
    ask.add_argument(
        "--depth", type=int, metavar="N", help="levels of the module tree (default: what is readable)"
    )
    ask.add_argument("--json", action="store_true", help="print everything, or what is asked about, as JSON")
    files = parser.add_argument_group("write")
    files.add_argument("--html", type=Path, metavar="FILE", help="a page to zoom, move and search")
    files.add_argument("--graphml", type=Path, metavar="FILE", help="for Gephi, yEd, networkx")
    files.add_argument("--dot", type=Path, metavar="FILE", help="for Graphviz")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = build_parser().parsed(argv)
    console, problems = consoles()

    def run() -> int:
        _inspect(arguments, console)
        return 0

    return guarded("smcp-inspect", run, problems, debug=arguments.debug)


def _inspect(arguments: argparse.Namespace, console: Console) -> None:
    _check(arguments)
    from smcp_fx.inspection import describe, inspect_model
    from smcp_fx.inspection.exports import to_dot, to_graphml
    from smcp_fx.inspection.page import render_inspection
    from smcp_fx.storage.files import write_texts

    inspection = inspect_model(
        arguments.model,
        input_size=arguments.input_size,
        multiple=arguments.multiple,
        exclude=tuple(arguments.exclude),
        widths=tuple(arguments.widths),
    )
    facts = describe(inspection)
    texts: dict[Path, str] = {}
    if arguments.html:
        texts[arguments.html] = render_inspection(facts)
    if arguments.graphml:
        texts[arguments.graphml] = to_graphml(inspection.channels)
    if arguments.dot:
        texts[arguments.dot] = to_dot(inspection.channels)
    if arguments.json:
        answer = _asked(arguments, inspection, facts)
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        _print(arguments, inspection, console)
    write_texts(texts, "the channel graph")
    for path in texts:
        if not arguments.json:
            console.print(f"wrote {path}", markup=False)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.channel is not None and arguments.module is None:
        raise InputError("--channel needs --module, which says of which layer")
    if arguments.group is not None and arguments.module is not None:
        raise InputError("--group and --module ask about different things: give one of them")
    if arguments.depth is not None and arguments.depth < 1:
        raise InputError(f"--depth must be at least 1, not {arguments.depth}")
    if arguments.multiple < 1:
        raise InputError(f"--multiple must be at least 1, not {arguments.multiple}")
    files = [path.resolve() for path in (arguments.html, arguments.graphml, arguments.dot) if path]
    if len(set(files)) < len(files):
        raise InputError("two of --html, --graphml and --dot name the same file")


def _print(arguments: argparse.Namespace, inspection: Any, console: Console) -> None:
    from smcp_fx.inspection.text import channel_text, group_text, module_text, overview

    shown: Any
    if arguments.group is not None:
        shown = group_text(inspection.channels, arguments.group)
    elif arguments.channel is not None:
        shown = channel_text(inspection.channels, arguments.module, arguments.channel, arguments.side)
    elif arguments.module is not None:
        shown = module_text(inspection.channels, arguments.module)
    else:
        shown = overview(inspection, arguments.depth)
    if not console.is_terminal:
        console.width = (
            _NO_WRAP  # one line per entry in a pipe or file; on a terminal, wrapped inside the tree
        )
    console.print(shown, soft_wrap=False)


def _asked(arguments: argparse.Namespace, inspection: Any, facts: dict[str, Any]) -> Any:
    """Return the content for --json: everything, or the requested group, module or channel."""
    from smcp_fx.inspection.text import layers_of

    if arguments.group is not None:
        name = inspection.channels[arguments.group].name
        return next(group for group in facts["groups"] if group["name"] == name)
    if arguments.channel is not None:
        words = inspection.channels.explain(arguments.module, arguments.channel, arguments.side)
        return {
            "module": arguments.module,
            "channel": arguments.channel,
            "side": arguments.side,
            "explanation": words.splitlines(),
        }
    if arguments.module is not None:
        paths = {layer.path for layer in layers_of(inspection.channels, arguments.module)}
        return [layer for layer in facts["layers"] if layer["path"] in paths]
    return facts


if __name__ == "__main__":
    sys.exit(main())
