"""Ways to visit a shop: by script, and over HTTP."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from megagent.envs.webshop.goals import Goal
from megagent.envs.webshop.world import WebShopWorld
from megagent.shop.serve import LOOPBACK, WebServer
from megagent.shop.sites import Site
from megagent.shop.visit import OpenShop

PATIENCE_S = 150.0  # the machine may be busy


def goal_of(shop: OpenShop, number: int) -> Goal:
    assert isinstance(shop.world, WebShopWorld)
    return shop.world.goal(shop.world.tasks("train")[number])


def way_to_win(shop: OpenShop, number: int) -> list[str]:
    """The actions that buy exactly what a task of the train panel asks for."""
    goal = goal_of(shop, number)
    visit = shop.visit(number)
    wanted = f"click[{goal.product.asin.lower()}]"
    actions = [f"search[{goal.product.title}]"]
    visit.act(actions[0])
    while wanted not in visit.observation.admissible:
        actions.append("click[next >]")
        assert visit.act(actions[-1]).admissible, f"{goal.product.asin} is on no page of results"
    return [*actions, wanted, *(f"click[{value}]" for _, value in goal.options), "click[buy now]"]


@dataclass(frozen=True)
class Client:
    """Requests to a server of ours."""

    address: str

    def get(self, path: str, headers: dict[str, str] | None = None) -> Any:
        """The answer as JSON, or as text where it is none. Raises urllib.error.HTTPError."""
        return self._ask(urllib.request.Request(self.address + path, headers=headers or {}))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | (headers or {})
        return self._ask(urllib.request.Request(self.address + path, content, headers))

    def refusal(self, ask: Callable[..., Any], *arguments: Any) -> tuple[int, str]:
        """Status and reason of a request that is refused."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(*arguments)
        with refused.value as answer:
            return answer.code, json.loads(answer.read())["error"]

    @staticmethod
    def _ask(request: urllib.request.Request) -> Any:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            content = answer.read().decode()
            return json.loads(content) if answer.headers.get_content_type() == "application/json" else content


@contextmanager
def serving(site: Site) -> Iterator[Client]:
    """A server for `site` in a thread of this process."""
    with WebServer(LOOPBACK, 0) as server:
        server.site = site
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield Client(server.address)
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)
