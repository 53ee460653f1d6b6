"""WebShop as an environment: the shared world, and one shopper's visit."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from megagent.envs.base import Split, Task, draw_tasks
from megagent.envs.webshop import catalog, embedded, goals
from megagent.envs.webshop.config import EMBEDDED, WebShopConfig
from megagent.envs.webshop.environment import WebShopEnvironment
from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.rules import HONEST, Rules
from megagent.envs.webshop.search import MOST_RESULTS, SearchIndex
from megagent.envs.webshop.session import Shop
from megagent.errors import CatalogError, MegagentError

_GOAL_SEED = 0  # of hidden prices and price bounds; fixed, so that a task means the same in every run


class WebShopWorld:
    """Catalogue, index and goals of one shop. Not changed after it is built, so any number of visits share it."""

    def __init__(self, shop: Shop, panels: Mapping[str, Sequence[Goal]], success_reward: float, source: str) -> None:
        self.shop = shop
        self.success_reward = success_reward
        self.digest = goals.panels_digest(panels)
        self._source = source
        self._panels = {split: tuple(Task(g.uid, split, g.key) for g in panel) for split, panel in panels.items()}
        self._goals = {goal.uid: goal for panel in panels.values() for goal in panel}

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of one panel. Raises CatalogError if it is empty, MegagentError if there is no such panel."""
        if split not in self._panels:
            raise MegagentError(f"no panel {split!r}; use one of {', '.join(self._panels)}")
        if not self._panels[split]:
            raise CatalogError(
                f"{self._source}: no goal falls in the {split} panel (products are dealt out by a hash of their asin, "
                f"and all panels hold {len(self._goals)} goals together); use a larger catalogue"
            )
        return self._panels[split]

    def draw(self, split: Split, count: int, seed: int, iteration: int) -> list[Task]:
        return draw_tasks(self.tasks(split), count, seed, iteration)

    def goal(self, task: Task) -> Goal:
        """What a task asks for. Raises MegagentError if it is not of this world."""
        if task.uid not in self._goals:
            raise MegagentError(f"task {task.uid} ({task.key}) is not one of {self._source}; use the same env.catalog")
        return self._goals[task.uid]

    def random_goal(self, task: Task, rng: random.Random) -> Goal:
        raise MegagentError("only env.compat=verl_agent begins another visit after a purchase")

    def make(self) -> WebShopEnvironment:
        return WebShopEnvironment(self)


def build_webshop(config: WebShopConfig) -> WebShopWorld:
    """The shop that `env.catalog` names: `embedded`, or a folder in the original's schema.

    Raises CatalogError with all faults of the folder's files.
    """
    if config.catalog == EMBEDDED:
        products = embedded.products()
        panels = goals.split_by_request(embedded.goals(products), embedded.HELD_OUT)
        most = embedded.RESULT_PAGES * config.page_size
    else:
        products = catalog.build_products(catalog.read_folder(config.catalog))
        most = MOST_RESULTS
    rng = random.Random(_GOAL_SEED)
    prices = catalog.sampled_prices(products, rng.uniform)
    if config.catalog != EMBEDDED:
        panels = goals.split_by_product(goals.synthetic_goals(products, prices, rng))
    shop = make_shop(products, prices, config.page_size, most, HONEST)
    return WebShopWorld(shop, panels, config.success_reward, f"env.catalog={config.catalog}")


def make_shop(
    products: Sequence[catalog.Product], prices: Mapping[str, float], page_size: int, most_results: int, rules: Rules
) -> Shop:
    """A shop over `products` with its search index built."""
    by_position = [prices[product.asin] for product in products]
    return Shop(products, SearchIndex.of(products), lambda price_seed: by_position, page_size, most_results, rules)
