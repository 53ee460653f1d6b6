"""What the agent reads, in both styles, and the limit on its length."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest

from megagent.config import EnvConfig, RolloutConfig
from megagent.config_load import load
from megagent.envs.base import Observation, build_world
from megagent.errors import ConfigError, MegagentError
from megagent.model_source import load_tokenizer
from megagent.rollout.memory import History
from megagent.rollout.prompts import PROMPTS, PromptBuilder, webshop, webshop_compact

ITEM = Observation(
    task="Find me a soft shirt with color: red",
    page="'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'red' [SEP] 'blue' [SEP] 'soft shirt' [SEP] 'Buy Now'",
    admissible=("click[back to search]", "click[< prev]", "click[buy now]", "click[red]", "click[blue]"),
)
INDEX = Observation(task=ITEM.task, page="'Search'", admissible=("search[<your query>]", "click[search]"))


class Words:
    """One token for each word."""

    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


class Remembers(Words):
    """Keeps the text that it encoded last."""

    text = ""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.text = text
        return super().encode(text, add_special_tokens)


class Chat(Words):
    chat_template = "user: {{ content }} assistant:"

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return f"<user> {messages[0]['content']} <assistant>"


def past(*steps: tuple[str, str], length: int = 2) -> History:
    history = History(length)
    for page, action in steps:
        history.add(page, action)
    return history


def builder(style: str, limit: int, tokenizer: Words | None = None) -> PromptBuilder:
    return PromptBuilder(EnvConfig(prompt=style), RolloutConfig(max_prompt_tokens=limit), tokenizer or Words())


@pytest.mark.parametrize("style", PROMPTS)
def test_every_style_shows_task_and_every_action(style):
    text = PROMPTS[style](ITEM, past()).lower()
    assert ITEM.task.lower() in text
    assert all(action in text for action in ITEM.admissible)


def test_webshop_shows_page_and_form_of_the_reply():
    text = webshop(ITEM, past())
    assert ITEM.page in text
    assert all(tag in text for tag in ("<think>", "</think>", "<action>", "</action>"))


def test_webshop_shows_the_last_steps_by_their_number():
    text = webshop(ITEM, past(("'a'", "click[a]"), ("'b'", "click[b]"), ("'c'", "click[c]")))
    assert "[Observation 2: ''b'', Action 2: 'click[b]']\n[Observation 3: ''c'', Action 3: 'click[c]']" in text
    assert "3 step(s)" in text
    assert "now at step 4" in text
    assert "click[a]" not in text


def test_webshop_without_history_says_nothing_of_steps():
    assert "Observation" not in webshop(ITEM, past(("'a'", "click[a]"), length=0))


def test_compact_marks_actions_in_place_and_once():
    text = webshop_compact(ITEM, past())
    assert text.endswith(
        "click[back to search] [SEP] click[< prev] [SEP] color [SEP] click[red] [SEP] click[blue] [SEP] "
        "soft shirt [SEP] click[buy now]\n"
    )


def test_compact_appends_actions_that_are_no_text_of_the_page():
    observation = Observation(task="t", page="'one'", admissible=("click[two]",))
    assert webshop_compact(observation, past()) == "t\none [SEP] click[two]\n"


def test_compact_shows_a_search_box_as_one_action():
    assert webshop_compact(INDEX, past()).splitlines()[-1] == "search[<your query>]"


def test_compact_shows_past_actions_without_pages():
    text = webshop_compact(ITEM, past(("'Search'", "search[soft shirt]"), ("'results'", "click[b01]")))
    assert text.splitlines()[1:3] == ["search[soft shirt]", "click[b01]"]
    assert "results" not in text


def test_compact_keeps_a_quote_inside_a_segment():
    observation = Observation(task="t", page="'men's' [SEP] 'it's'", admissible=())
    assert webshop_compact(observation, past()) == "t\nmen's [SEP] it's\n"


def test_a_prompt_that_fits_keeps_its_history():
    history = past(("'a'", "click[a]"))
    assert builder("webshop", 1000).build(ITEM, history) == Words().encode(webshop(ITEM, history), False)


def test_a_prompt_that_is_too_long_drops_its_history():
    bare = Words().encode(webshop(ITEM, past()), False)
    assert builder("webshop", len(bare)).build(ITEM, past(("'a'", "click[a]"))) == bare


def tokens_of(observation, style=webshop):
    return len(Words().encode(style(observation, past()), False))


@pytest.mark.parametrize(("name", "style"), [("webshop", webshop), ("webshop_compact", webshop_compact)])
def test_a_page_that_is_too_long_is_cut_at_its_end_and_keeps_every_action(name, style):
    long = replace(ITEM, page=f"{ITEM.page} [SEP] '{'soft ' * 5000}'")
    limit = tokens_of(ITEM, style) + 10
    tokenizer = Remembers()
    cutter = builder(name, limit, tokenizer)
    prompt = cutter.build(long, past(("'a'", "click[a]")))
    assert limit - 3 <= len(prompt) <= limit
    assert all(action in tokenizer.text for action in ITEM.admissible)
    assert "soft soft" in tokenizer.text
    assert cutter.cut == 1


def test_actions_that_are_too_many_are_cut_after_the_page():
    many = replace(ITEM, admissible=tuple(f"click[value {number}]" for number in range(1000)))
    tokenizer = Remembers()
    assert len(builder("webshop", 200, tokenizer).build(many, past())) <= 200
    assert "click[value 0]" in tokenizer.text
    assert "click[value 999]" not in tokenizer.text


def test_pages_of_real_products_fit_into_the_prompt_of_the_tiny_agent():
    catalog = os.environ.get("MEGAGENT_WEBSHOP_DATA")
    if not catalog:
        pytest.skip("set MEGAGENT_WEBSHOP_DATA to the folder with items_shuffle_1000.json.gz to read real pages")
    config = load(["experiment=webshop_tiny", f"env.catalog={catalog}"])
    world = build_world(config.env)
    environment = world.make()
    cutter = PromptBuilder(config.env, config.rollout, load_tokenizer(config.model.path))
    for task in list(world.tasks("train"))[:20]:
        first = environment.reset(task)
        cutter.require_fit(first)
        results = environment.step(f"search[{first.task}]").observation
        product = next(action for action in results.admissible if action.startswith("click[b0"))
        item = environment.step(product).observation
        description = environment.step("click[description]").observation
        for observation in (results, item, description):
            assert len(cutter.build(observation, past())) <= config.rollout.max_prompt_tokens
    assert cutter.cut > 20


def test_a_prompt_that_fits_is_not_counted_as_cut():
    whole = builder("webshop", tokens_of(ITEM))
    whole.build(ITEM, past(("'a'", "click[a]")))
    whole.require_fit(ITEM)
    assert whole.cut == 0


def test_a_first_prompt_that_is_too_long_is_an_error_that_names_value_rule_and_fix():
    tokens = tokens_of(ITEM)
    with pytest.raises(MegagentError, match=f"{tokens} tokens.*rollout.max_prompt_tokens={tokens - 1}.*Set") as caught:
        builder("webshop", tokens - 1).require_fit(ITEM)
    assert re.search(r"env\.page_size", str(caught.value))


def test_a_task_that_is_too_long_by_itself_is_an_error():
    with pytest.raises(MegagentError, match=r"longer than rollout\.max_prompt_tokens=20\."):
        builder("webshop", 20).build(ITEM, past())


def test_an_unknown_style_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"env\.prompt=webshopp.*webshop_compact"):
        builder("webshopp", 10)


def test_a_chat_template_wraps_the_text():
    tokens = builder("webshop", 1000, Chat()).build(ITEM, past())
    assert tokens[0] == len("<user>")
    assert tokens[-1] == len("<assistant>")


def test_the_prompt_of_sokoban_keeps_the_room_as_it_is_drawn() -> None:
    history = History(2)
    for move in ("up", "left", "down"):
        history.add("a room", move)
    room = Observation("push every box ($) onto a target (.)", "#####\n#@$.#\n#####", ("up", "down", "left", "right"))
    text = PROMPTS["sokoban"](room, history)
    assert "\nYour last moves: left, down.\n#####\n#@$.#\n#####\nMove up, down, left, right." in text
