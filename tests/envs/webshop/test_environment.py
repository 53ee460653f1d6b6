from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.envs.base import SPLITS, Task
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.pages import option_labels
from megagent.envs.webshop.rules import HONEST
from megagent.envs.webshop.world import build_webshop
from megagent.errors import MegagentError
from megagent.rollout.projection import is_admissible


def test_an_environment_reports_reward_only_for_a_won_episode(world):
    task = world.tasks("train")[0]
    environment = world.make()
    observation = environment.reset(task)
    assert observation.admissible == ("search[<your query>]",)
    assert observation.task == world.goal(task).text
    assert observation.task not in observation.page
    environment.step("search[shirt]")
    opened = environment.step(f"click[{environment.session.shown()[0].asin.lower()}]")
    assert (opened.reward, opened.done, opened.won, opened.score) == (0.0, False, False, 0.0)
    bought = environment.step("click[buy now]")
    assert (bought.done, bought.won, bought.reward) == (True, False, 0.0)
    assert bought.observation.admissible == ()


def test_an_environment_does_not_start_over_by_itself(world):
    environment = world.make()
    environment.reset(world.tasks("train")[0])
    environment.step("search[shirt]")
    environment.step(f"click[{environment.session.shown()[0].asin.lower()}]")
    environment.step("click[buy now]")
    with pytest.raises(MegagentError, match=r"the episode has ended; call reset"):
        environment.step("search[shirt]")


def test_an_environment_wants_a_reset_first(world):
    with pytest.raises(MegagentError, match=r"call reset\(task\) first"):
        world.make().step("search[shirt]")


def test_a_task_of_another_world_is_refused(world):
    with pytest.raises(MegagentError, match=r"task webshop-x \(y\) is not one of env.catalog=embedded"):
        world.make().reset(Task("webshop-x", "train", "y"))


def test_an_unknown_panel_is_refused(world):
    with pytest.raises(MegagentError, match=r"no panel 'dev'; use one of"):
        world.tasks("dev")


def test_visits_of_one_world_do_not_touch_each_other(world):
    first, second = world.make(), world.make()
    task = world.tasks("train")[0]
    first.reset(task)
    before = second.reset(task)
    first.step("search[shirt]")
    assert second.step("nothing").observation == before


WORLD = build_webshop(WebShopConfig(page_size=4))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_admissible_action_is_carried_out_until_the_purchase(data):
    environment = WORLD.make()
    observation = environment.reset(WORLD.tasks("train")[0])
    for _ in range(12):
        choices = [action for action in observation.admissible if action != "click[search]"]
        action = data.draw(st.sampled_from(choices)).replace("<your query>", "soft shirt red")
        again = action.removeprefix("click[").removesuffix("]") in environment.session.chosen.values()
        result = environment.step(action)
        assert again or result.observation != observation
        assert result.done == (action == "click[buy now]")
        if result.done:
            break
        observation = result.observation


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_not_admissible_changes_nothing(data):
    environment = WORLD.make()
    environment.reset(WORLD.tasks("train")[0])
    for action in data.draw(st.sampled_from([[], ["search[shirt]"], ["search[warm]", "click[next >]"]])):
        environment.step(action)
    observation = environment.step("").observation
    argument = data.draw(st.sampled_from(["red", "next >", "< prev", "buy now", " ", "", "a\nb", "[x]", "search"]))
    form = data.draw(st.sampled_from(["search[{}]", "click[{}]", "search[{}] now", "so click[{}]", "{}", "click [{}]"]))
    action = form.format(argument)
    result = environment.step(action)
    assert is_admissible(action, observation.admissible) or (result.observation, result.done) == (observation, False)


def clicked_through(world, task):
    """The result of buying exactly what a task asks for, by clicks only."""
    goal = world.goal(task)
    environment = world.make()
    environment.reset(task)
    action = f"click[{goal.product.asin.lower()}]"
    observation = environment.step(f"search[{' '.join(goal.product.title.split())}]").observation
    while action not in observation.admissible:
        assert "click[next >]" in observation.admissible, f"no search finds {goal.product.asin}"
        observation = environment.step("click[next >]").observation
    environment.step(action)
    labels = {choice: label for label, choice in option_labels(goal.product, HONEST).items()}
    for option in goal.options:
        environment.step(f"click[{labels[option]}]")
    return environment.step("click[buy now]")


def test_buying_exactly_what_was_asked_wins_with_every_option_of_every_real_product(data):
    """A few goals of each product; test_golden.py scores all of them, without the clicks."""
    world = build_webshop(WebShopConfig(catalog=str(data)))
    bought = set()
    for task in (task for split in SPLITS for task in world.tasks(split)):
        goal = world.goal(task)
        asked = {(goal.product.asin, option) for option in (*goal.options, None)}
        if not asked <= bought:
            assert clicked_through(world, task).won, task
            bought |= asked
    assert len(bought) > 2000


@pytest.fixture(scope="module")
def original():
    return build_webshop(WebShopConfig(compat="verl_agent"))


def bought(environment, task):
    environment.reset(task)
    environment.step("search[shirt]")
    environment.step(f"click[{environment.session.shown()[0].asin.lower()}]")
    return environment.step("click[buy now]")


def test_the_original_begins_another_visit_behind_the_callers_back(original):
    task = original.tasks("train")[0]
    environment = original.make()
    last = bought(environment, task)
    assert last.done
    assert last.observation.page.startswith("Thank you for shopping with us!")
    assert last.observation.admissible == ("search[<your query>]", "click[search]")
    after = environment.step("search[jacket]")
    assert not after.done
    goal = environment.session.goal
    assert after.observation.page.startswith(f"Instruction: [SEP] {goal.text} [SEP] Back to Search")
    assert environment.reset(task).task == original.goal(task).text


def test_the_goal_of_a_visit_behind_the_callers_back_follows_from_the_task(original):
    task, other = original.tasks("train")[:2]
    one, two = original.make(), original.make()
    bought(one, other)
    for environment in (one, two):
        bought(environment, task)
        environment.step("anything")
    assert one.session.goal == two.session.goal
