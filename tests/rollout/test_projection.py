"""What a model's text means to the environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagent.envs.webshop.config import WebShopConfig
from megagent.rollout.projection import HONEST, TAIL_CHARACTERS, is_admissible, project

ORIGINAL = WebShopConfig(compat="verl_agent").reply_rules

ITEM_PAGE = ("click[back to search]", "click[buy now]", "click[red]", "click[Size: 9 (wide) | 43]")
SEARCH_PAGE = ("search[<your query>]", "click[search]")


def test_a_thought_and_an_offered_action_are_valid():
    result = project("<think>red it is</think><action>click[red]</action>", ITEM_PAGE)
    assert (result.action, result.parsed, result.admissible, result.valid) == ("click[red]", True, True, True)


def test_text_around_tags_and_space_inside_them_do_not_matter():
    assert project("so: <think>a</think>\n then <action>\n click[red] \n</action> done", ITEM_PAGE).valid


def test_case_does_not_matter():
    result = project("<Think>x</THINK><Action>Click[RED]</Action>", ITEM_PAGE)
    assert (result.action, result.valid) == ("click[red]", True)


def test_an_offered_action_is_compared_in_lower_case():
    assert project("<think>x</think><action>click[size: 9 (wide) | 43]</action>", ITEM_PAGE).valid


def test_an_action_that_the_page_does_not_offer_parses_but_is_invalid():
    result = project("<think>x</think><action>click[blue]</action>", ITEM_PAGE)
    assert (result.action, result.parsed, result.admissible, result.valid) == ("click[blue]", True, False, False)


@pytest.mark.parametrize("query", ["red shirt", "a [b] c", "click[red]", "<your query>", "50% off | new"])
def test_a_search_box_admits_any_query(query):
    assert project(f"<think>x</think><action>search[{query}]</action>", SEARCH_PAGE).valid


@pytest.mark.parametrize("action", ["search[]", "search[  ]", "search[x", "search", "i search[x]", "search[a\nb]"])
def test_a_search_box_does_not_admit_a_malformed_search(action):
    assert not project(f"<think>x</think><action>{action}</action>", SEARCH_PAGE).valid


def test_a_search_without_a_search_box_is_invalid():
    assert not project("<think>x</think><action>search[red]</action>", ITEM_PAGE).valid


@pytest.mark.parametrize(
    "text",
    [
        "<action>click[red]</action>",  # no thought
        "<think>never closed<action>click[red]</action>",
        "</think>closed before it opens<think><action>click[red]</action>",
    ],
)
def test_an_action_without_a_whole_thought_acts_but_is_invalid(text):
    result = project(text, ITEM_PAGE)
    assert (result.action, result.parsed, result.admissible, result.valid) == ("click[red]", False, True, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<think>x</think>",
        "<think>x</think><action>click[red]",  # cut off by the response limit
        "<think>x</think>click[red]</action>",
        "\x00\ufffd\U0001f600",
    ],
)
def test_a_reply_without_an_action_does_nothing(text):
    result = project(text, ITEM_PAGE)
    assert (result.action, result.parsed, result.admissible, result.valid) == ("", False, False, False)


def test_in_the_original_a_reply_without_an_action_acts_through_its_last_characters():
    text = "I think that I should click[BUY NOW]"
    assert project(text, ITEM_PAGE).action == ""
    tail = project(text, ITEM_PAGE, ORIGINAL)
    assert (tail.action, tail.parsed, tail.valid) == (text.lower()[-TAIL_CHARACTERS:], False, False)
    bare = project("click[buy now]", ITEM_PAGE, ORIGINAL)
    assert (bare.action, bare.admissible, bare.valid) == ("click[buy now]", True, False)


def test_in_the_original_an_action_that_the_page_does_not_offer_is_valid():
    text = "<think>x</think><action>click[blue]</action>"
    assert not project(text, ITEM_PAGE).valid
    result = project(text, ITEM_PAGE, ORIGINAL)
    assert (result.parsed, result.admissible, result.valid) == (True, False, True)


@pytest.mark.parametrize("text", ["</think><think><action></action>", "<think></think><action>x</action>"])
def test_in_the_original_tags_of_a_thought_count_in_any_order(text):
    assert project(text, ITEM_PAGE, ORIGINAL).valid
    assert not project(text, ITEM_PAGE, HONEST).valid


def test_in_the_original_tags_of_a_thought_are_read_as_they_are_written():
    text = "<Think>x</Think><ACTION>click[red]</ACTION>"
    assert not project(text, ITEM_PAGE, ORIGINAL).valid
    assert project(text, ITEM_PAGE).valid


def test_action_tags_in_the_wrong_order_give_no_action():
    result = project("<think>x</think></action>click[red]<action>", ITEM_PAGE)
    assert (result.action, result.parsed, result.valid) == ("", False, False)


def test_the_first_of_several_actions_counts():
    text = "<think>x</think><action>click[red]</action><action>click[buy now]</action>"
    assert project(text, ITEM_PAGE).action == "click[red]"


def test_the_end_of_the_action_is_the_first_closing_tag_even_inside_an_argument():
    assert project("<think>x</think><action>click[red</action>]</action>", ITEM_PAGE).action == "click[red"


@pytest.mark.parametrize("rules", [HONEST, ORIGINAL])
def test_chinese_characters_make_a_reply_invalid(rules):
    assert not project("<think>红色</think><action>click[red]</action>", ITEM_PAGE, rules).valid


def test_nothing_is_admissible_on_a_page_without_actions():
    assert not is_admissible("click[red]", ())


@given(text=st.text(max_size=60), body=st.text(max_size=20))
def test_any_text_projects_and_valid_implies_admissible(text, body):
    for reply in (text, f"<think>{text}</think><action>{body}</action>"):
        result = project(reply, ITEM_PAGE)
        assert result.valid == (result.parsed and result.admissible)
        assert result.admissible == is_admissible(result.action, ITEM_PAGE)
