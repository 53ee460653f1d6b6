"""How long a large catalogue takes to build, in how much memory, and how long to open.

    python -m benchmarks.shop_build [--quick] [--products N] [--keep FILE.shop]

The source is multiplied: the real 1,000 products where MEGAGENT_WEBSHOP_DATA names their folder, else the embedded 60.
Every copy has asins of its own, other prices, and titles with a third of the words taken from other titles and, in half
of them, a model number that occurs nowhere else, so that the index has to grow as it does with products of the world.
Written as plain JSON in the original's schema, then built by the command, `megagent shop build`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, close
from megagent.envs.webshop.build import open_source
from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.config import EMBEDDED

WHOLE = 1_181_436  # products of the original's full data
QUICK = 20_000
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NAMES = 36**9
_STRIDE = 30_000_000_000_031  # prime, so that n * _STRIDE modulo 36**9 is another name for each n
_SECONDS, _BYTES, _OPEN = 30 * 60, 2 << 30, 1.0


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--products", type=int, help=f"default {WHOLE}, or {QUICK} with --quick")
    parser.add_argument("--keep", type=Path, metavar="FILE.shop", help="where the built catalogue is left")
    options = parser.parse_args()
    wanted = options.products or (QUICK if options.quick else WHOLE)
    source = os.environ.get("MEGAGENT_WEBSHOP_DATA", EMBEDDED)
    say = (lambda text: None) if options.json else (lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory(dir=options.keep.parent if options.keep else None) as folder:
        began = time.monotonic()
        multiply(source, Path(folder), wanted)
        read = sum(path.stat().st_size for path in Path(folder).iterdir())
        say(f"{wanted:,} products made of {source}: {read / 1e9:.2f} GB in {time.monotonic() - began:.0f} s")
        out = options.keep or Path(folder) / "big.shop"
        seconds, cpu, peak = watched_build(Path(folder), out, quiet=options.json)
        size = out.stat().st_size
        opened, products = opening(out)
    say(f"built in {seconds:.1f} s ({wanted / seconds:,.0f} products/s), {cpu:.1f} s of processors")
    say(f"peak {peak / 2**30:.2f} GiB in all processes")
    say(f"{size / 1e9:.2f} GB, {size / wanted:,.0f} bytes a product; opened in {opened * 1e3:.2f} ms")
    figures = {
        "products": wanted,
        "source_bytes": read,
        "build_s": seconds,
        "build_cpu_s": cpu,
        "products_per_s": wanted / seconds,
        "peak_rss_bytes": peak,
        "catalogue_bytes": size,
        "open_s": opened,
    }
    bars = {
        "all products are in it": products == wanted,
        "built within 30 minutes": seconds < _SECONDS,
        "peak memory of all processes under 2 GiB": peak < _BYTES,
        "opens within 1 s": opened < _OPEN,
    }
    return close("shop_build", figures, bars)


def multiply(source: str, folder: Path, products: int) -> None:
    """Writes a folder in the original's schema with as many products as asked for, made of those of `source`."""
    records = open_source(source)
    items: list[dict[str, Any]] = list(records.items)
    entries = {item["asin"]: records.attributes.get(item["asin"]) for item in items} if records.attributes else {}
    records.close()
    words = sorted({word for item in items for word in item["name"].split()})
    with (folder / "items_shuffle.json").open("w") as goods, (folder / "items_ins_v2.json").open("w") as attributes:
        goods.write("[\n")
        attributes.write("{\n")
        for number, (item, asin) in enumerate(_copies(items, words, products)):
            comma = ",\n" if number else ""
            goods.write(comma + item)
            attributes.write(f'{comma}"{asin}": {json.dumps(entries[items[number % len(items)]["asin"]])}')
        goods.write("\n]\n")
        attributes.write("\n}\n")


def _copies(items: list[dict[str, Any]], words: list[str], products: int) -> Iterator[tuple[str, str]]:
    """Each copy as JSON text, and its asin; the first of every item is the item itself."""
    rng = random.Random(0)
    # What does not change is made into JSON once: it is nearly all of the text.
    tails = [json.dumps({k: v for k, v in item.items() if k not in ("asin", "name", "pricing")})[1:] for item in items]
    for number in range(products):
        item, tail = items[number % len(items)], tails[number % len(items)]
        asin, name, pricing = item["asin"], item["name"], item.get("pricing") or ""
        if number >= len(items):
            asin = _asin(number)
            name = " ".join(rng.choice(words) if rng.random() < 1 / 3 else word for word in name.split())
            if number % 2:
                name += f" {asin[1:6].lower()}{rng.randrange(1000)}"
            amounts = [f"${float(amount) * rng.uniform(0.5, 2):.2f}" for amount in _amounts(pricing)]
            pricing = " to ".join(amounts)
        yield f'{{"asin": "{asin}", "name": {json.dumps(name)}, "pricing": {json.dumps(pricing)}, {tail}', asin


def _asin(number: int) -> str:
    """A name of ten characters for each number, in no order."""
    rest, name = number * _STRIDE % _NAMES, ""
    for _ in range(9):
        rest, digit = divmod(rest, 36)
        name += _DIGITS[digit]
    return f"C{name}"


def _amounts(pricing: str) -> list[str]:
    return ["".join(c for c in part if c in "0123456789.") for part in pricing.split("$")[1:]]


def watched_build(source: Path, out: Path, *, quiet: bool) -> tuple[float, float, int]:
    """Runs the command. Returns its seconds, those of processors, and the most memory of all its processes, bytes."""
    began = time.monotonic()
    command = [sys.executable, "-m", "megagent.cli", "shop", "build", str(source), str(out), "--overwrite"]
    hidden = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, stdout=hidden, stderr=hidden, start_new_session=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _session_memory(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"the build has failed with status {process.returncode}; its messages are above")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, used.ru_utime + used.ru_stime, peak


def _session_memory(session: int) -> int:
    """Resident bytes of all processes of a session; pages that they share count for each."""
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.getsid(int(folder.name)) == session:
                total += int((folder / "statm").read_text().split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
    return total * os.sysconf("SC_PAGESIZE")


def opening(path: Path) -> tuple[float, int]:
    """Seconds until a built catalogue is open and its last product in hand, and how many products it has."""
    began = time.perf_counter()
    catalog = Catalog.open(path)
    _ = catalog[-1]
    return time.perf_counter() - began, len(catalog)


if __name__ == "__main__":
    raise SystemExit(main())
