"""The convention of every benchmark: --quick and --json, and one JSON object as the last line.

{"name": ..., "figures": {name: number}, "bars": {"what must hold": true | false}}
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the two options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small version that shows it works; its bars prove less")
    parser.add_argument("--json", action="store_true", help="print the last line only")
    return parser


def close(name: str, figures: Mapping[str, float], bars: Mapping[str, bool]) -> int:
    """Print the last line; the exit status: 0 if every bar holds, else 1."""
    rounded = {key: round(float(value), 4) for key, value in figures.items()}
    print(json.dumps({"name": name, "figures": rounded, "bars": dict(bars)}))
    return 0 if all(bars.values()) else 1
