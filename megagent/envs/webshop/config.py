"""The keys that WebShop adds to `env`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from megagent.config import EnvConfig, ReplyRules, number, one_of
from megagent.envs.webshop.rules import rules_of

EMBEDDED = "embedded"


@dataclass
class WebShopConfig(EnvConfig):
    """`env` when env.name=webshop."""

    catalog: str = EMBEDDED  # embedded, a folder with the original's files, or a .shop file built from one
    compat: str = one_of("none", "verl_agent")  # verl_agent: the original's behaviour and verl-agent's, faults included
    goals: str = one_of("synthetic", "human")
    observation: str = one_of("text", "text_rich")
    page_size: int = number(10, 1)  # products on a results page
    max_results: int = number(50, 1)  # products that a search finds at most

    @property
    def reply_rules(self) -> ReplyRules:
        rules = rules_of(self.compat)
        return ReplyRules(rules.tail_acts, rules.valid_if_offered, rules.whole_thought)

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.catalog:
            yield "catalog", "env.catalog: must not be empty"
            return
        path = os.path.expanduser(self.catalog)
        if self.catalog != EMBEDDED and not (os.path.isdir(path) or os.path.isfile(path)):
            fix = "give a folder with the catalogue's files, what `megagent shop build` made of one, or embedded"
            yield "catalog", f"env.catalog={self.catalog}: there is no such folder or file; {fix}"
