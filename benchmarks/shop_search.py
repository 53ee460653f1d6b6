"""How long a search takes, and whether its results are those of Lucene.

    python -m benchmarks.shop_search [--quick] [--catalog FILE.shop]

On the real 1,000 products where MEGAGENT_WEBSHOP_DATA names their folder, else on the embedded ones, with the golden
queries that lie beside the folder, else with words of titles; and on the catalogue of --catalog, where every tenth
query is also searched the slow way. Times are of one core, those spent waiting for it left out.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import arguments, close
from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.search import MOST_RESULTS, SearchIndex

SMALL_MEAN_MS = 0.5
LARGE_P95_MS = 25.0
_COMPARED = 10  # every so many queries


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--catalog", type=Path, metavar="FILE.shop", help="a built catalogue, a large one say")
    options = parser.parse_args()
    source = os.environ.get("MEGAGENT_WEBSHOP_DATA", "embedded")
    catalog = Catalog.load(source)
    golden = golden_results(Path(source).parent / "golden" / "search_top50.jsonl.gz")
    queries = list(golden) or words_of_titles(catalog)
    if options.quick:
        queries = queries[::10]
    say = (lambda text: None) if options.json else (lambda text: print(text, flush=True))

    index = SearchIndex(catalog.arrays)
    figures = measure(index, queries, "small", say)
    bars = {f"mean under {SMALL_MEAN_MS} ms on {len(catalog):,} products": figures["small/mean_ms"] < SMALL_MEAN_MS}
    if golden:
        asins = ([catalog[position].asin for position in index.search(query)] for query in queries)
        exact = sum(found == golden[query] for query, found in zip(queries, asins, strict=True))
        figures["small/top50_exact"] = exact / len(queries)
        bars[f"the first {MOST_RESULTS} are Lucene's, in its order, for every golden query"] = exact == len(queries)
    if options.catalog:
        large = Catalog.open(options.catalog)
        index = SearchIndex(large.arrays)
        figures |= measure(index, queries, "large", say)
        bars[f"p95 under {LARGE_P95_MS} ms on {len(large):,} products"] = figures["large/p95_ms"] < LARGE_P95_MS
        same = all(index.search(query) == index.search_all(query) for query in queries[::_COMPARED])
        bars["the fast way finds what the slow way finds"] = same
    return close("shop_search", figures, bars)


def golden_results(path: Path) -> dict[str, list[str]]:
    """Query -> asins that Lucene finds, in its order; empty if the file is not there."""
    if not path.is_file():
        return {}
    lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    return {line["query"]: line["top50"] for line in lines}


def words_of_titles(catalog: Catalog) -> list[str]:
    """400 queries of one to eight words of one title each."""
    rng = random.Random(0)
    titles = [product.title.split() for product in (catalog[rng.randrange(len(catalog))] for _ in range(400))]
    return [" ".join(rng.sample(words, min(len(words), rng.randint(1, 8)))) for words in titles]


def measure(index: SearchIndex, queries: Sequence[str], name: str, say: Callable[[str], None]) -> dict[str, float]:
    """Milliseconds of a query, in the second of two rounds."""
    for query in queries:
        index.search(query)
    spent = []
    for query in queries:
        began = time.process_time_ns()
        index.search(query)
        spent.append((time.process_time_ns() - began) / 1e6)
    mean, median, p95, most = map(float, (np.mean(spent), np.median(spent), np.percentile(spent, 95), np.max(spent)))
    say(f"{name}: mean {mean:.3f} ms, median {median:.3f}, p95 {p95:.3f}, longest {most:.3f}; {len(spent)} queries")
    return {f"{name}/queries": len(spent), f"{name}/mean_ms": mean, f"{name}/p95_ms": p95, f"{name}/longest_ms": most}


if __name__ == "__main__":
    raise SystemExit(main())
