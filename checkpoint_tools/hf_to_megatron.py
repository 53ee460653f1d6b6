#!/usr/bin/env python
"""A Hugging Face folder as a Megatron checkpoint: `megagent convert hf-to-megatron` by another name."""

import sys

from megagent.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
