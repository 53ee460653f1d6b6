"""`python -m megagent` is the `megagent` command."""

import sys

from megagent.cli import main

sys.exit(main())
