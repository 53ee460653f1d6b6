"""Where the shop differs from the original WebShop, one named rule each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """The behaviour of a shop. The fields' defaults are the honest ones; `ORIGINAL` is the WebShop of verl-agent."""

    # An asked option counts if the value bought under that name is the asked one. The original compares the text
    # "name value" with any bought value fuzzily: wrong sizes count, and some colours cannot be satisfied at all.
    options_by_name: bool = True
    # The page of an item says what is selected. In the original's text mode it is the same before and after a click.
    shows_selection: bool = True
    # A value that two options share, or that is also the text of a button, is offered as "name: value". In the
    # original such a click always means the button, or the last option with the value.
    tells_values_apart: bool = True
    # An action is the whole text, nothing before or after it. In the original "search[x] now" searches for x.
    whole_actions: bool = True
    # A search is carried out only where there is a search box. The original takes it on every page.
    searches_from_box: bool = True
    # "Next >" is offered only if there is another page of results. In the original it leads on for ever.
    pages_end: bool = True
    # A button that does nothing is no action. The original offers click[search] beside its search box.
    buttons_act: bool = True
    # A query that begins with <r>, <c> or <q> lists products at random, by category or by their kind.
    magic_keywords: bool = False
    # In text_rich, what has been clicked is looked up in the address of the page: a value in quotes anywhere in it
    # counts, so an option's name or a word of the query can mark a value, and one with an accent is never marked.
    marks_by_address: bool = False
    # The step that buys also begins a visit with another goal, drawn at random, behind the caller's back.
    restarts_after_purchase: bool = False
    # A reply without action tags acts through its last 20 characters, so a bare click[buy now] buys.
    tail_acts: bool = False
    # An action is valid only if the page offers it. To the original every action between tags is valid.
    valid_if_offered: bool = True
    # A reply parses only with a thought and an action that says something. verl-agent looks for the tags of a thought
    # in lower case and any order, and takes an empty action.
    whole_thought: bool = True
    # Panels share no product. The original holds out the first 500 places of a list that each worker shuffles with a
    # seed of its own, so that what one holds out another trains on.
    split_by_product: bool = True
    # Hidden prices and price bounds are drawn once, with the catalogue. In the original each worker draws its own.
    draws_once: bool = True
    # A value that an option lists twice makes one goal. In the original it makes two.
    goals_once: bool = True
    # A goal drawn at random is the next one in the list: never the first, and the last one for two.
    random_goal_is_next: bool = False


HONEST = Rules()
ORIGINAL = Rules(
    options_by_name=False,
    shows_selection=False,
    tells_values_apart=False,
    whole_actions=False,
    searches_from_box=False,
    pages_end=False,
    buttons_act=False,
    magic_keywords=True,
    marks_by_address=True,
    restarts_after_purchase=True,
    tail_acts=True,
    valid_if_offered=False,
    whole_thought=False,
    split_by_product=False,
    draws_once=False,
    goals_once=False,
    random_goal_is_next=True,
)

_BY_COMPAT = {"none": HONEST, "verl_agent": ORIGINAL}


def rules_of(compat: str) -> Rules:
    """The rules that env.compat names: none or verl_agent."""
    return _BY_COMPAT[compat]
