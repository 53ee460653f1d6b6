from __future__ import annotations

from collections.abc import Iterator

import pytest

from megagent.shop.visit import OpenShop, ShopOptions, open_shop
from tests.shop.browser import Browser, start_browser


@pytest.fixture(scope="session")
def shop() -> OpenShop:
    """The embedded catalogue."""
    return open_shop(ShopOptions(seed=1))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Skips, saying so, where there is no Chromium and none can be installed."""
    pytest.importorskip("websockets", reason="the browser is spoken to over a websocket; install megagent[cpu]")
    with start_browser(tmp_path_factory.mktemp("browser")) as started:
        yield started
