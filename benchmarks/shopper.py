"""What a shopper without any learning scores on held-out tasks: the baseline that an agent has to beat.

    python -m benchmarks.shopper [--quick] [--catalog FOLDER|FILE.shop]

It searches for the words of the task, opens the first product, selects the options that the task names and buys. On the
real 1,000 products where MEGAGENT_WEBSHOP_DATA names their folder, else on the embedded ones; the panel is `test`.
"""

from __future__ import annotations

import os

from benchmarks.report import arguments, close
from megagent.envs import build_world
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.shopper import first_hit
from megagent.observe.intervals import wilson_interval

QUICK_TASKS = 64


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--catalog", default=os.environ.get("MEGAGENT_WEBSHOP_DATA", "embedded"))
    options = parser.parse_args()
    world = build_world(WebShopConfig(catalog=options.catalog))
    tasks = list(world.tasks("test"))
    if options.quick:
        tasks = tasks[:QUICK_TASKS]
    environment = world.make()
    ends = [first_hit(environment, task) for task in tasks]
    won = sum(end.won for end in ends)
    low, high = wilson_interval(won, len(ends))
    score = sum(end.score for end in ends) / len(ends)
    if not options.json:
        print(f"{len(ends)} held-out tasks: {won / len(ends):.1%} won ({low:.1%}-{high:.1%}), mean score {score:.3f}")
    figures = {"tasks": len(ends), "success_rate": won / len(ends), "low": low, "high": high, "score": score}
    bars = {
        "every visit ends with a purchase": all(end.done for end in ends),
        "some purchases are what was asked for": won > 0,
    }
    return close("shopper", figures, bars)


if __name__ == "__main__":
    raise SystemExit(main())
