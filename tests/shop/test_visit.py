from __future__ import annotations

from dataclasses import replace

import pytest

from megagent.envs.base import Observation
from megagent.envs.webshop import pages
from megagent.errors import ConfigError, MegagentError
from megagent.shop.visit import OpenShop, ShopOptions, open_shop
from tests.shop.visitors import goal_of, way_to_win


@pytest.mark.parametrize("compat", ["none", "verl_agent"])
def test_a_purchase_ends_the_visit_with_its_own_score(compat: str) -> None:
    """Also where the environment begins another visit by itself."""
    shop = open_shop(ShopOptions(compat=compat))
    visit = shop.visit(2)
    for action in way_to_win(shop, 2):
        visit.act(action)
    assert visit.outcome is not None
    assert (visit.outcome.won, visit.outcome.score) == (True, 1.0)
    assert visit.page.kind == "done"
    with pytest.raises(MegagentError, match="this visit has ended"):
        visit.act("search[another]")


def test_every_button_of_a_page_is_an_action_of_the_agent_and_the_other_way_round(shop: OpenShop) -> None:
    visit = shop.visit(0)
    for action in ["search[shirt]", *way_to_win(shop, 0)[:-1]]:
        visit.act(action)
        offered = [text for text in visit.observation.admissible if text != pages.SEARCH_BOX]
        assert sorted(button.action for button in visit.page.in_order()) == sorted(offered)
        assert visit.page.has_search_box == (pages.SEARCH_BOX in visit.observation.admissible)


def test_what_is_selected_is_marked(shop: OpenShop) -> None:
    visit = shop.visit(0)
    for action in way_to_win(shop, 0)[:-1]:
        visit.act(action)
    marked = {(row.name, button.label) for row in visit.page.options for button in row.buttons if button.selected}
    assert marked == set(goal_of(shop, 0).options)


def test_the_same_seed_draws_the_same_tasks() -> None:
    first, second = (open_shop(ShopOptions(seed=4)) for _ in range(2))
    assert [first.another().number for _ in range(5)] == [second.another().number for _ in range(5)]


def test_a_task_that_was_asked_for_comes_first() -> None:
    shop = open_shop(ShopOptions(task=6, panel="test", seed=1))
    assert [(visit.task.split, visit.number) for visit in (shop.first(), shop.first())] == [("test", 6)] * 2
    assert {shop.another().number for _ in range(9)} != {6}


def test_a_task_that_the_panel_does_not_have_is_named_with_those_it_has() -> None:
    with pytest.raises(MegagentError, match="task 100000: the train panel has tasks 0 to"):
        open_shop(ShopOptions(task=100000))


def test_all_faults_of_the_options_are_told_together() -> None:
    options = ShopOptions(catalog="no/such/folder", compat="verl", goals="dog", observation="html", panel="dev")
    with pytest.raises(ConfigError) as failed:
        open_shop(options)
    text = str(failed.value)
    assert "megagent shop: 5 problems" in text
    assert "--compat verl: use one of none, verl_agent" in text
    assert "--panel dev: use one of warmup, train, validation, test" in text
    assert "no/such/folder: there is no such folder or file" in text


def test_the_page_is_that_of_training() -> None:
    """Ten products a page, unless the catalogue is the embedded one."""
    shop = open_shop(ShopOptions())
    assert shop.max_steps == 8
    visit = shop.visit(0)
    visit.act("search[shirt]")
    assert len(visit.page.offers) == 4


def test_control_characters_of_a_catalogue_are_not_shown(shop: OpenShop) -> None:
    visit = shop.visit(0)
    visit.act(way_to_win(shop, 0)[0])
    session = visit._environment.session
    hostile = [replace(product, title="\x1b[2J", price_tag="\x9b1m") for product in session.shown()]
    session.shown = lambda: hostile  # type: ignore[method-assign]
    from megagent.shop.page import page_of

    page = page_of(session, Observation("", "", visit.observation.admissible))
    assert [(offer.title, offer.price) for offer in page.offers] == [("␛[2J", "\ufffd1m")] * len(hostile)
