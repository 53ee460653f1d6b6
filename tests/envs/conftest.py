from __future__ import annotations

import pytest

from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.world import WebShopWorld, build_webshop


@pytest.fixture(scope="session")
def world() -> WebShopWorld:
    """The embedded shop as the tiny experiment has it."""
    return build_webshop(WebShopConfig(page_size=4, max_steps=8))
