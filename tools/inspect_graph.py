"""Look at a model's channel graph; the same as the console command smcp-inspect."""

import sys

from smcp_fx.cli.inspect import main

if __name__ == "__main__":
    sys.exit(main())
