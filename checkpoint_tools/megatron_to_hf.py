#!/usr/bin/env python
"""A Megatron checkpoint as a Hugging Face folder: `megagent convert megatron-to-hf` by another name."""

import sys

from megagent.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
