"""Run an experiment of the paper from its recipe; the same as the console command smcp-train."""

import sys

from smcp_fx.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
