"""smcp-train: the paper's experiments, from recipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from smcp_fx.cli.common import CommandParser, consoles, guarded, interruptible, wait_asleep
from smcp_fx.cli.flags import add_options, chosen

_EXAMPLES = """examples:
  smcp-train --list
  # the plan, without data
  smcp-train resnet50-30 --dry-run --cost flops
  # ... in ms, measuring what is missing
  smcp-train resnet50-30 --dry-run --table gpu.sqlite --backend onnxruntime
  # on eight GPUs
  torchrun --nproc-per-node 8 -m smcp_fx.cli.train resnet50-30 \\
      --data /data/imagenet --table gpu.sqlite
  # a baseline
  smcp-train ssd512-resnet50-25 --dense --data /data/voc --out runs/ssd512
  # a hundredth of the epochs, on small images
  smcp-train resnet50-30 --data /data/small --cost flops --fraction 0.01 \\
      --set training.batch=32 --set size=64
"""


def build_parser() -> CommandParser:
    """Return the command line's parser, made from the settings' dataclass."""
    from smcp_fx.recipes.settings import RunSettings

    parser = CommandParser(
        prog="smcp-train",
        description="Run an experiment of the paper from its recipe: train, prune while training, convert, evaluate, "
        "and write the smaller network with a record of the run. Under torchrun on several GPUs.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("recipe", nargs="?", help="name of a recipe (--list), or a file that ends in .toml")
    parser.add_argument("--list", action="store_true", help="list the recipes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="change a field of the recipe, such as training.batch=32; may be repeated")  # fmt: skip
    add_options(parser.add_argument_group("the run"), RunSettings)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = vars(build_parser().parsed(argv))
    debug = arguments.pop("debug")
    console, problems = consoles()

    def run() -> int:
        from smcp_fx.errors import InputError
        from smcp_fx.recipes.plan import recipe_line
        from smcp_fx.recipes.recipe import load_recipe, recipe_names
        from smcp_fx.recipes.run import run_recipe
        from smcp_fx.recipes.settings import RunSettings

        if arguments["list"]:
            for name in recipe_names():
                console.print(recipe_line(load_recipe(name)))
            return 0
        if arguments["recipe"] is None:
            raise InputError("which recipe? --list names them")
        wait_asleep(argv)
        run_recipe(arguments["recipe"], chosen(RunSettings, arguments), arguments["overrides"], console)
        return 0

    rank = os.environ.get("RANK", "0")
    return guarded(
        "smcp-train" if rank == "0" else f"smcp-train (rank {rank})",
        run,
        problems,
        debug=debug,
        interrupted=f"Continue with the same command and --resume (checkpoint in {arguments['out']}).",
        advice="Free space or give another --out.",
    )


if __name__ == "__main__":
    sys.exit(main())
