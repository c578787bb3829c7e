"""`python -m fluxcb` is the command line."""

import sys

from fluxcb._tools.cli import main

sys.exit(main())
