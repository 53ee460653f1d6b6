from __future__ import annotations

from dataclasses import fields

import pytest

from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.rules import HONEST, ORIGINAL, Rules, rules_of


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_every_rule_tells_the_original_and_the_honest_shop_apart(rule):
    assert getattr(HONEST, rule) != getattr(ORIGINAL, rule)


def test_the_honest_rules_are_the_default():
    assert rules_of(WebShopConfig().compat) == HONEST == Rules()
    assert rules_of("verl_agent") == ORIGINAL
