"""The page as a browser shows it: a headless Chromium, from the system or its packages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megagent.observe.episodes import read_episodes
from megagent.shop.sites import ReplaySite, ShopSite
from megagent.shop.visit import OpenShop, ShopOptions, open_shop
from tests.shop.browser import Browser, Tab
from tests.shop.recordings import SHOPPED, WANDERED, episode, step, write
from tests.shop.visitors import serving, way_to_win

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test may have to install the browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as tab:
        yield tab
        tab.value("1")  # what came before it has been read now
        assert tab.complaints == []


def test_a_person_shops_by_clicking_and_sees_the_score_explained(tab: Tab) -> None:
    shop = open_shop(ShopOptions(task=5))
    with serving(ShopSite(shop)) as client:
        tab.open(client.address)
        assert tab.text("#instruction") == shop.first().instruction
        for action in way_to_win(shop, 5):
            tab.act(action)
        assert "Score 1.000 of 1 (won" in tab.text("#verdict")
        assert tab.value("[...document.querySelectorAll('#parts tbody tr')].length") == 4
        assert "attributes" in tab.text("#parts")
        assert tab.value("document.querySelectorAll('#buttons button, #offers button').length") == 0


def test_the_agents_page_stands_beside_the_persons(tab: Tab, shop: OpenShop) -> None:
    with serving(ShopSite(shop)) as client:
        tab.open(client.address)
        tab.act("search[soft shirt]")
        assert tab.text("#observation").startswith("'Back to Search' [SEP] 'Page 1 (Total results:")
        assert "click[back to search]" in tab.text("#admissible")
        tab.click("#offers button")
        tab.click("#options button")
        assert tab.value("document.querySelectorAll('#options button.selected').length") == 1
        assert "search[soft shirt]" in tab.text("#moves")


def test_two_tabs_are_two_visits_and_loading_again_keeps_each(browser: Browser, shop: OpenShop) -> None:
    with serving(ShopSite(shop)) as client, browser.tab() as one, browser.tab() as other:
        for tab in (one, other):
            tab.open(client.address)
        one.act("search[shirt]")
        for tab in (one, other):
            tab.open(client.address + "?again")
        assert one.text("#heading").startswith("Page 1")
        assert other.text("#heading") == "Search the shop"


def test_a_task_can_be_picked_and_one_that_is_not_there_is_told(tab: Tab, shop: OpenShop) -> None:
    with serving(ShopSite(shop)) as client:
        tab.open(client.address)
        tab.value("document.querySelector('#task-number').value = 3")
        tab.click("#go-to-task")
        assert tab.text("#instruction") == shop.visit(3).instruction
        tab.value("document.querySelector('#task-number').value = 100000")
        tab.click("#go-to-task")
        assert "the train panel has tasks 0 to" in tab.text("#message")
    tab.value("1")
    assert [text for text in tab.complaints if "400" in text] == tab.complaints != []
    tab.complaints.clear()


def test_a_recorded_episode_is_walked_through(tab: Tab, tmp_path: Path) -> None:
    path = write(tmp_path / "e.jsonl", SHOPPED, WANDERED)
    with serving(ReplaySite(read_episodes(path), path.name)) as client:
        tab.open(client.address)
        assert (tab.text("#place"), tab.text("#heading")) == ("step 1 of 3", "Action: search[red shirt]")
        tab.click("#later")
        assert tab.text("#texts .clicked") == "B123"
        assert tab.text("#reply") == "<think>so</think>"
        assert not tab.value("document.querySelector('#outcome').checkVisibility()")
        tab.click("#later")
        assert tab.text("#verdict") == "The episode ended after 3 steps: score 1.000, won."
        tab.value(
            "(() => { const e = document.querySelector('#episodes'); e.value = 1; "
            "e.dispatchEvent(new Event('change')); })()"
        )
        tab.wait("document.querySelector('#instruction').textContent === 'find a hat'")
        assert tab.text("#heading") == "Action: dance (the page does not offer the action)"


ATTACK = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


def assert_shown_as_text(tab: Tab, *places: str) -> None:
    for place in places:
        assert ATTACK in tab.text(place)
    assert tab.value("document.querySelectorAll('body img, body script').length") == 0
    assert tab.value("document.title") == "megagent shop"


def test_what_a_model_wrote_stays_text(tab: Tab, tmp_path: Path) -> None:
    hostile = episode([step(f"'{ATTACK}' [SEP] 'x'", f"click[{ATTACK}]", ATTACK)], instruction=ATTACK)
    path = write(tmp_path / "e.jsonl", hostile)
    with serving(ReplaySite(read_episodes(path), ATTACK)) as client:
        tab.open(client.address)
        assert_shown_as_text(tab, "#instruction", "#texts", "#reply", "#observation", "#kind", "#moves", "#episodes")


class HostileSite:
    """A shop in which every text is an attack."""

    def __init__(self, ended: bool) -> None:
        part = {"component": ATTACK, "met": ATTACK, "share": 0.5, "sentence": ATTACK}
        self.outcome = {"score": 0.5, "won": False, "parts": [part]} if ended else None

    def get(self, path: Sequence[str]) -> Any:
        return {"kind": "shop", "panel": ATTACK, "tasks": 1}

    def post(self, path: Sequence[str], body: dict[str, Any]) -> Any:
        button = {"label": ATTACK, "action": ATTACK, "selected": True}
        page = {"heading": ATTACK, "texts": [ATTACK], "has_search_box": True, "buttons": [button]}
        page |= {"offers": [{"button": button, "title": ATTACK, "price": ATTACK}]}
        page |= {"options": [{"name": ATTACK, "buttons": [button]}]}
        visit = {"visit": ATTACK, "number": 0, "task": ATTACK, "steps": 1, "max_steps": 8, "page": page}
        visit |= {"observation": ATTACK, "admissible": [ATTACK], "moves": [{"action": ATTACK, "admissible": False}]}
        return visit | {"outcome": self.outcome}


def test_what_a_catalogue_holds_stays_text(tab: Tab) -> None:
    with serving(HostileSite(ended=False)) as client:
        tab.open(client.address)
        shown = ("#panel", "#instruction", "#heading", "#texts", "#buttons", "#options", "#offers", "#observation")
        assert_shown_as_text(tab, *shown, "#admissible", "#moves")
    with serving(HostileSite(ended=True)) as client:
        tab.open(client.address)
        assert_shown_as_text(tab, "#parts")
