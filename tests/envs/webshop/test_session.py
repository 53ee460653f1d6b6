from __future__ import annotations

import pytest

from megagent.envs.webshop.rules import HONEST, ORIGINAL

from .visits import acted, visit


def test_the_search_page_offers_the_box():
    session = visit()
    assert session.has_search_box
    assert session.clickables == ()
    assert session.admissible() == ("search[<your query>]",)
    assert session.anchor() == "'Search'"


def test_in_the_original_the_search_page_also_offers_a_button_that_does_nothing():
    session = visit(ORIGINAL)
    assert session.admissible() == ("search[<your query>]", "click[search]")
    assert acted(session, "click[search]").page == "search"


def test_results_show_a_page_of_products_with_their_price():
    session = acted(visit(), "search[shirt]")
    assert session.clickables == ("back to search", "next >", "b1", "b2")
    assert session.segments() == [
        "Back to Search", "Page 1 (Total results: 5)", "Next >",
        "B1", "Blue Cotton Shirt", "$10.5", "B2", "Blue Cotton Shirt", "$10.5",
    ]  # fmt: skip


def test_pages_of_results_lead_to_each_other_and_end():
    session = acted(visit(), "search[shirt]", "click[next >]")
    assert session.clickables == ("back to search", "< prev", "next >", "b3", "b4")
    assert acted(session, "click[next >]").clickables == ("back to search", "< prev", "b5")
    assert "Next >" not in session.segments()
    assert acted(session, "click[next >]").results_page == 3
    assert acted(session, "click[< prev]").clickables[-1] == "b4"


def test_in_the_original_pages_of_results_never_end():
    session = acted(visit(ORIGINAL), "search[shirt]", *["click[next >]"] * 3)
    assert session.clickables == ("back to search", "< prev", "next >")
    assert session.segments()[1] == "Page 4 (Total results: 5)"
    assert acted(session, "click[< prev]").clickables[-1] == "b5"


def test_an_item_offers_its_parts_and_then_its_options_in_page_order():
    session = acted(visit(), "search[shirt]", "click[b1]")
    assert session.clickables == (
        "back to search", "< prev", "description", "features", "reviews", "buy now", "s", "l", "red", "blue",
    )  # fmt: skip


def test_the_selection_is_said_in_the_order_of_the_options_whatever_the_order_of_the_clicks():
    one = acted(visit(), "search[shirt]", "click[b1]", "click[red]", "click[s]")
    other = acted(visit(), "search[shirt]", "click[b1]", "click[s]", "click[blue]", "click[red]")
    assert "Selected: size s, color red" in one.segments()
    assert one.anchor() == other.anchor()


def test_the_original_does_not_show_the_selection():
    session = acted(visit(ORIGINAL), "search[shirt]", "click[b1]")
    before = session.anchor()
    assert acted(session, "click[red]").anchor() == before
    assert session.chosen == {"color": "red"}


def test_a_new_value_replaces_the_old_one_and_a_second_click_keeps_it():
    session = acted(visit(), "search[shirt]", "click[b1]", "click[red]", "click[blue]", "click[blue]")
    assert session.chosen == {"color": "blue"}


def test_sub_pages_keep_the_selection_and_offer_no_purchase():
    session = acted(visit(), "search[shirt]", "click[b1]", "click[red]", "click[description]")
    assert session.clickables == ("back to search", "< prev")
    assert session.segments() == ["Back to Search", "< Prev", "A shirt."]
    assert acted(session, "click[< prev]", "click[features]").segments()[2:] == ["washable", "light"]
    assert acted(session, "click[< prev]", "click[reviews]").segments()[2:] == []
    assert acted(session, "click[< prev]").chosen == {"color": "red"}


@pytest.mark.parametrize(
    ("rules", "action"),
    [(HONEST, "click[< prev]"), (HONEST, "click[back to search]"), (ORIGINAL, "search[shirt]")],
)
def test_leaving_an_item_clears_the_selection(rules, action):
    session = acted(visit(rules), "search[shirt]", "click[b1]", "click[red]", action)
    assert session.chosen == {}


def test_back_from_an_item_returns_to_the_same_page_of_results():
    session = acted(visit(), "search[shirt]", "click[next >]", "click[b4]", "click[< prev]")
    assert session.clickables[-2:] == ("b3", "b4")


@pytest.mark.parametrize(
    "action",
    ["", "buy now", "click[]", "Click[red]", "click [red]", "I will click[red]", "click[green]", "click[search]",
     "search[]", "search[\nx]", "search[a [b] c]", "think[x]"],
)  # fmt: skip
def test_what_is_no_action_of_the_page_changes_nothing(action):
    session = acted(visit(), "search[shirt]", "click[b1]")
    before = (session.anchor(), session.clickables, dict(session.chosen))
    session.act(action)
    assert (session.anchor(), session.clickables, session.chosen) == before


@pytest.mark.parametrize(
    "action", ["search[shirt] now", "I search[shirt]", "search[shirt", "search[ ]", "Search[shirt]"]
)
def test_an_action_is_the_whole_text(action):
    assert acted(visit(), action).page == "search"


def test_the_case_of_an_argument_does_not_matter():
    session = acted(visit(), "search[SHIRT]", "click[B1]", "click[Red]")
    assert session.chosen == {"color": "red"}


def test_in_the_original_an_action_is_read_from_its_start():
    session = acted(visit(ORIGINAL), "search[SHIRT] now", "click[B1] please", "click[Red]")
    assert session.chosen == {"color": "red"}
    assert acted(session, "I will search[shirt]").page == "item"


def test_a_search_wants_a_search_box():
    session = acted(visit(), "search[shirt]", "click[b1]")
    before = session.anchor()
    assert acted(session, "search[nothing at all]").anchor() == before
    assert acted(session, "click[back to search]", "search[nothing at all]").segments() == [
        "Back to Search", "Page 1 (Total results: 0)",
    ]  # fmt: skip


def test_in_the_original_a_search_is_accepted_on_every_page():
    session = acted(visit(ORIGINAL), "search[shirt]", "click[b1]", "search[nothing at all]")
    assert session.segments()[1] == "Page 1 (Total results: 0)"


@pytest.mark.parametrize("query", ["<r>", "<a> washable", "<c> fashion", "<q> shirts"])
def test_magic_keywords_are_plain_text(query):
    found = acted(visit(), f"search[{query}]").hits
    assert len(found) in (0, 5)
    assert found == acted(visit(), f"search[{query.replace('<', '').replace('>', '')}]").hits


def test_in_the_original_a_keyword_lists_a_category_or_a_kind_of_products_whole():
    session = visit(ORIGINAL, count=60, name="x", customization_options=None)
    assert acted(session, "search[<c> fashion shoes]").segments()[1] == "Page 1 (Total results: 60)"
    assert acted(session, "search[<c> beauty]").segments()[1] == "Page 1 (Total results: 0)"
    assert acted(session, "search[<q> shirts]").segments()[1] == "Page 1 (Total results: 60)"
    assert acted(session, "search[<q> shirt]").segments()[1] == "Page 1 (Total results: 0)"


def test_in_the_original_a_keyword_lists_other_products_at_random_on_every_page():
    session = acted(visit(ORIGINAL, count=60), "search[<r>]")
    first = list(session.hits)
    assert len(set(first)) == 50
    assert list(acted(session, "click[next >]").hits) != first


@pytest.mark.parametrize("query", ["<a> washable", "<c>", "<r>"])
def test_what_crashes_the_original_is_a_query(query):
    session = acted(visit(ORIGINAL), f"search[{query}]")
    assert list(session.hits) == list(acted(visit(), f"search[{query}]").hits)


def test_a_purchase_is_scored_and_ends_the_visit():
    session = acted(visit(), "search[shirt]", "click[b2]", "click[red]", "click[buy now]")
    assert session.done
    assert session.clickables == ()
    assert session.reward is not None
    assert session.reward.score == pytest.approx(3 / 4)
    assert '[SEP] B2 [SEP] options [SEP] {"color": "red"} [SEP]' in session.anchor()
    page = session.anchor()
    assert acted(session, "search[shirt]", "click[back to search]").anchor() == page


SHARED = {"Trim": [{"value": "red"}, {"value": "Features"}], "Color": [{"value": "Red"}, {"value": "Blue"}]}


def test_a_value_of_two_options_or_of_a_button_is_offered_with_its_name():
    session = acted(visit(customization_options=SHARED), "search[shirt]", "click[b1]")
    assert session.clickables[-4:] == ("trim: red", "trim: features", "color: red", "blue")
    assert acted(session, "click[color: red]", "click[trim: features]").chosen == {"color": "red", "trim": "features"}


def test_in_the_original_the_last_option_with_a_value_is_meant():
    session = acted(visit(ORIGINAL, customization_options=SHARED), "search[shirt]", "click[b1]", "click[red]")
    assert session.chosen == {"color": "red"}
