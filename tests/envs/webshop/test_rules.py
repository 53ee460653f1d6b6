from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.rules import HONEST, ORIGINAL, Rules, rules_of

TESTS = Path(__file__).parents[2]
DOCS = TESTS.parent / "docs" / "webshop.md"


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_every_rule_tells_the_original_and_the_honest_shop_apart(rule):
    assert getattr(HONEST, rule) != getattr(ORIGINAL, rule)


def test_the_honest_rules_are_the_default():
    assert rules_of(WebShopConfig().compat) == HONEST == Rules()
    assert rules_of("verl_agent") == ORIGINAL


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_every_rule_has_a_line_in_the_docs_that_names_its_test(rule):
    (line,) = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{rule}` |")]
    tests = re.findall(r"`(test_\w+)`", line)
    assert tests
    for name in tests:
        assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")), name
