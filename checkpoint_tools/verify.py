#!/usr/bin/env python
"""Whether two checkpoints hold the same: `megagent convert verify` by another name."""

import sys

from megagent.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "verify", *sys.argv[1:]]))
