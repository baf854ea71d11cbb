"""`python -m caraserve` is the `caraserve` command."""

import sys

from caraserve.cli import main

sys.exit(main())
