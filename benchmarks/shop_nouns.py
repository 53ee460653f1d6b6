"""How near the nouns of titles come to the original's tagger, by rule and, where its model is installed, by spaCy.

    MEGAGENT_WEBSHOP_DATA=FOLDER python -m benchmarks.shop_nouns

Needs the real 1,000 products and, beside their folder, the golden nouns and rewards. A score changes if a purchase that
the original scored is scored otherwise with the nouns of both titles found anew.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, close
from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.nouns import RuleTagger
from megagent.envs.webshop.original import OriginalGoals
from megagent.envs.webshop.reward import purchase_reward
from megagent.envs.webshop.rules import ORIGINAL
from megagent.envs.webshop.tagger import SpacyTagger, Tagger, installed_model

Nouns = Mapping[str, tuple[str, ...]]  # by asin


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    folder = os.environ.get("MEGAGENT_WEBSHOP_DATA")
    if not folder:
        parser.error("MEGAGENT_WEBSHOP_DATA does not name the folder of the 1,000 real products")
    golden = Path(folder).parent / "golden"
    catalog = Catalog.load(folder)
    tagged = {asin: tuple(nouns) for asin, nouns in read(golden / "title_nouns.json.gz").items()}
    prices = read(golden / "prices_seed0.json.gz")
    lines = gzip.decompress((golden / "rewards_seed0.jsonl.gz").read_bytes()).splitlines()
    purchases = [json.loads(line) for line in (lines[::10] if options.quick else lines)]

    taggers: dict[str, Tagger] = {"rules": RuleTagger()}
    if model := installed_model():
        taggers["spacy"] = SpacyTagger(model)
    figures: dict[str, float] = {"scores": len(purchases)}
    for name, tagger in taggers.items():
        began = time.process_time()
        found = tagger.nouns([product.title for product in catalog])
        spent = time.process_time() - began
        nouns = {product.asin: own for product, own in zip(catalog, found, strict=True)}
        precision, recall = agreement(nouns, tagged)
        changed = changed_scores(catalog, nouns, prices, purchases)
        figures |= {
            f"{name}/precision": precision,
            f"{name}/recall": recall,
            f"{name}/changed_scores": changed,
            f"{name}/titles_per_s": len(catalog) / max(spent, 1e-9),
        }
        if not options.json:
            print(
                f"{tagger.name}: precision {precision:.3f}, recall {recall:.3f}, {changed} of {len(purchases)} scores "
                f"differ, {len(catalog) / max(spent, 1e-9):,.0f} titles/s"
            )
    bars = {
        "by rule, at most 1 score in 80 differs": figures["rules/changed_scores"] * 80 <= len(purchases),
        "by rule, precision is 0.93 and recall 0.98": figures["rules/precision"] > 0.93
        and figures["rules/recall"] > 0.98,
    }
    if model:
        bars["by spaCy, no score differs"] = figures["spacy/changed_scores"] == 0
    return close("shop_nouns", figures, bars)


def read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def agreement(nouns: Nouns, tagged: Nouns) -> tuple[float, float]:
    """Precision and recall of `nouns`, repetitions counted."""
    pairs = [(Counter(nouns[asin]), Counter(wanted)) for asin, wanted in tagged.items()]
    both = sum((found & wanted).total() for found, wanted in pairs)
    return both / sum(found.total() for found, _ in pairs), both / sum(wanted.total() for _, wanted in pairs)


def changed_scores(catalog: Catalog, nouns: Nouns, prices: Mapping[str, float], purchases: list[dict[str, Any]]) -> int:
    """How many of the original's scores are others with `nouns`."""
    goals = OriginalGoals(catalog, human=False).of_seed(0)
    products = {product.asin: replace(product, nouns=nouns[product.asin]) for product in catalog}
    changed = 0
    for purchase in purchases:
        goal = goals[purchase["goal"]]
        goal = replace(goal, product=products[goal.product.asin])
        bought, price = products[purchase["asin"]], prices[purchase["asin"]]
        reward = purchase_reward(goal, bought, price, purchase["options"], ORIGINAL)
        changed += reward.score != purchase["reward"]
    return changed


if __name__ == "__main__":
    raise SystemExit(main())
