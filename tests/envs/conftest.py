from __future__ import annotations

import pytest

from megagent.config import EnvConfig
from megagent.envs.webshop.world import WebShopWorld, build_webshop


@pytest.fixture(scope="session")
def world() -> WebShopWorld:
    """The embedded shop as the tiny experiment has it."""
    return build_webshop(EnvConfig(page_size=4, max_steps=8))
