"""`python -m`: the worker's command line."""

import sys

from .main import main

sys.exit(main())
