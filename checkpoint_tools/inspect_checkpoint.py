#!/usr/bin/env python
"""What is in a checkpoint: `megagent convert inspect` by another name."""

import sys

from megagent.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "inspect", *sys.argv[1:]]))
