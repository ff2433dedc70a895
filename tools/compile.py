"""Make a network as fast as asked; the same as the console command smcp-compile."""

import sys

from smcp_fx.cli.compile import main

if __name__ == "__main__":
    sys.exit(main())
