"""The agent loop against an engine and environments that live in this process and answer by rule."""

from __future__ import annotations

import asyncio

import pytest
import torch

from megagent.algos.credit import credit
from megagent.config import AlgoConfig, Config
from megagent.envs.base import Observation, StepResult, Task
from megagent.envs.webshop.config import WebShopConfig
from megagent.errors import EpisodeLost, InfrastructureError
from megagent.rollout.collector import Collector
from megagent.rollout.engine import Generation, Sampling
from megagent.rollout.episode import step_rows
from megagent.rollout.metrics import rollout_metrics
from tests.letters import Letters


class Script:
    """An engine that writes the same reply to everybody, after giving way to the other episodes."""

    def __init__(self, reply: str) -> None:
        self.reply = reply
        self.samplings: list[Sampling] = []

    async def generate(self, slot: int, prompt_ids: list[int], sampling: Sampling) -> Generation:
        self.samplings.append(sampling)
        await asyncio.sleep(0)
        ids = [ord(character) for character in self.reply]
        return Generation(token_ids=ids, log_probs=[-0.5] * len(ids), finish_reason="stop", version=1)


class Counters:
    """Environments whose episode in slot k ends after k + 1 steps; an odd slot wins."""

    def __init__(self, fails_in_slot: int | None = None, losses: int = 0) -> None:
        """losses: times that the episode in slot 2 is lost at its second step."""
        self.steps: dict[int, int] = {}
        self.fails_in_slot = fails_in_slot
        self.losses = losses

    def observe(self, slot: int) -> Observation:
        return Observation(task="count", page=f"page {self.steps[slot]}", admissible=("click[next]",))

    async def reset(self, slot: int, task: Task) -> Observation:
        self.steps[slot] = 0
        return self.observe(slot)

    async def step(self, slot: int, action: str) -> StepResult:
        if slot == self.fails_in_slot:
            raise InfrastructureError("env.name=counters: step of task t1 raised ValueError: broken.")
        if slot == 2 and self.steps[slot] == 1 and self.losses:
            self.losses -= 1
            raise EpisodeLost("play: the process of environment worker 0 died (killed).")
        self.steps[slot] += 1
        done = self.steps[slot] == slot + 1
        won = done and slot % 2 == 1
        return StepResult(self.observe(slot), reward=10.0 if won else 0.0, done=done, won=won, score=float(won))


TASKS = [Task(uid=f"t{index}", split="train", key=str(index)) for index in range(2)]
GOOD = "<think>on</think><action>click[next]</action>"


def collector(reply: str, environments: Counters, max_steps: int = 3) -> tuple[Collector, Script]:
    config = Config()
    config.env.max_steps = max_steps
    engine = Script(reply)
    return Collector(config, Letters(), engine, environments), engine  # type: ignore[arg-type]


def test_episodes_end_when_the_environment_says_so_or_at_max_steps() -> None:
    play, _ = collector(GOOD, Counters())
    episodes = play.collect(TASKS, episodes_per_task=2, temperature=1.0, seed=0)
    assert [len(episode.steps) for episode in episodes] == [1, 2, 3, 3]
    assert [episode.finished for episode in episodes] == [True, True, True, False]
    assert [episode.won for episode in episodes] == [False, True, False, False]
    assert [episode.task.uid for episode in episodes] == ["t0", "t0", "t1", "t1"]


def test_rows_hold_only_steps_that_were_played() -> None:
    play, _ = collector(GOOD, Counters())
    rows = step_rows(play.collect(TASKS, episodes_per_task=2, temperature=1.0, seed=0))
    assert len(rows) == 1 + 2 + 3 + 3
    assert rows["step_index"].tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2]
    assert rows["rewards"].tolist() == [0, 0, 10, 0, 0, 0, 0, 0, 0]
    assert rows["episode_rewards"].tolist() == [0, 10, 10, 0, 0, 0, 0, 0, 0]
    assert list(rows["anchor_obs"][:3]) == ["page 0", "page 0", "page 1"]
    assert rows["responses"].lengths.tolist() == [len(GOOD)] * 9
    assert torch.all(rows["rollout_log_probs"].values == -0.5)


def test_an_action_the_page_does_not_offer_is_marked_invalid() -> None:
    play, _ = collector("<think>on</think><action>click[buy now]</action>", Counters())
    episodes = play.collect(TASKS, episodes_per_task=1, temperature=1.0, seed=0)
    assert not step_rows(episodes)["is_action_valid"].any()
    assert {(step.parsed, step.admissible) for episode in episodes for step in episode.steps} == {(True, False)}


def test_a_reply_of_another_form_is_marked_so_even_if_its_action_is_offered() -> None:
    play, _ = collector("<action>click[next]</action>", Counters())
    episodes = play.collect(TASKS, episodes_per_task=1, temperature=1.0, seed=0)
    figures = rollout_metrics(episodes, step_rows(episodes))
    assert (figures["episode/parsed_reply_ratio"], figures["episode/admissible_action_ratio"]) == (0, 1)
    steps = [step for episode in episodes for step in episode.steps]
    assert {(step.parsed, step.admissible, step.valid) for step in steps} == {(False, True, False)}


@pytest.mark.parametrize(("compat", "acted"), [("none", False), ("verl_agent", True)])
def test_a_reply_without_tags_acts_only_where_the_environment_has_it_so(compat: str, acted: bool) -> None:
    play, _ = collector("I think I should click[next]", Counters())
    play.config.env = WebShopConfig(compat=compat, max_steps=1)
    [episode] = play.collect(TASKS[:1], episodes_per_task=1, temperature=1.0, seed=0)
    assert (episode.steps[0].action == "i should click[next]") is acted
    assert not episode.steps[0].valid


def test_every_step_samples_with_its_own_seed_and_a_repeated_run_with_the_same() -> None:
    first, engine = collector(GOOD, Counters())
    first.collect(TASKS, episodes_per_task=2, temperature=0.7, seed=5)
    again, repeated = collector(GOOD, Counters())
    again.collect(TASKS, episodes_per_task=2, temperature=0.7, seed=5)
    seeds = [sampling.seed for sampling in engine.samplings]
    assert len(set(seeds)) == len(seeds) == 9
    assert sorted(seeds) == sorted(sampling.seed for sampling in repeated.samplings)
    assert {sampling.temperature for sampling in engine.samplings} == {0.7}


def test_an_environment_that_raises_ends_the_rollout_and_scores_nothing() -> None:
    play, _ = collector(GOOD, Counters(fails_in_slot=1))
    with pytest.raises(InfrastructureError, match="raised ValueError: broken"):
        play.collect(TASKS, episodes_per_task=1, temperature=1.0, seed=0)


def test_a_lost_episode_is_played_again_and_yields_what_it_would_have() -> None:
    unbroken, engine = collector(GOOD, Counters())
    expected = unbroken.collect(TASKS, episodes_per_task=2, temperature=1.0, seed=0)
    play, repeated = collector(GOOD, Counters(losses=2))
    episodes = play.collect(TASKS, episodes_per_task=2, temperature=1.0, seed=0)
    assert [episode.steps for episode in episodes] == [episode.steps for episode in expected]
    assert [episode.lost for episode in episodes] == [0, 0, 2, 0]
    assert rollout_metrics(episodes, step_rows(episodes))["rollout/lost_episodes"] == 2
    assert {sampling.seed for sampling in repeated.samplings} == {sampling.seed for sampling in engine.samplings}


def test_an_episode_lost_too_often_ends_the_rollout_with_one_sentence() -> None:
    play, _ = collector(GOOD, Counters(losses=3))
    with pytest.raises(InfrastructureError, match=r"task t1: .* lost 3 times and env.retries=2; .* worker 0 died"):
        play.collect(TASKS, episodes_per_task=2, temperature=1.0, seed=0)


# Four sampled episodes in slots 0 to 3 and a greedy one of each task in slots 4 and 5: max_steps=6 lets slot 5 win.


def test_a_greedy_episode_of_each_task_is_played_at_temperature_0_beside_the_others() -> None:
    play, engine = collector(GOOD, Counters(), max_steps=6)
    done: list[int] = []
    episodes = play.collect(
        [TASKS[0], TASKS[0], TASKS[1]],
        episodes_per_task=2,
        temperature=0.7,
        seed=0,
        progress=done.append,
        with_greedy=True,
    )
    assert len(episodes) == sum(done) == 6
    assert [episode.greedy.traj_uid for episode in episodes if episode.greedy] == ["t0/0/greedy"] * 4 + [
        "t1/0/greedy"
    ] * 2
    assert sorted({sampling.temperature for sampling in engine.samplings}) == [0.0, 0.7]
    assert sum(sampling.temperature == 0 for sampling in engine.samplings) == 12  # two episodes, cut at six steps


def test_the_reward_of_the_greedy_episode_is_the_baseline_of_its_tasks_rows_and_of_no_metric() -> None:
    play, _ = collector(GOOD, Counters(), max_steps=6)
    episodes = play.collect(TASKS, episodes_per_task=2, temperature=1.0, seed=0, with_greedy=True)
    rows = step_rows(episodes)
    # Slot 5, the greedy episode of the second task, wins; its six rows are not among the 1 + 2 + 3 + 4.
    assert rows["baseline_rewards"].tolist() == [0.0] * 3 + [10.0] * 7
    figures = rollout_metrics(episodes, rows)
    assert figures["rollout/greedy_success"] == 0.5
    assert (figures["episode/success_rate"], figures["episode/length/max"]) == (0.5, 4)
    algo = AlgoConfig(estimator="remax")
    advantages = credit(rows, algo)["advantages"].take([0, 1, 3, 6])
    # Lost against a lost one, won against a lost one; lost against a won one, won against a won one.
    assert advantages.values[advantages.offsets[:-1]].tolist() == [0.0, 10.0, -10.0, 0.0]


def test_without_greedy_episodes_there_is_no_baseline() -> None:
    play, _ = collector(GOOD, Counters())
    episodes = play.collect(TASKS, episodes_per_task=1, temperature=1.0, seed=0)
    assert "baseline_rewards" not in step_rows(episodes)
    assert "rollout/greedy_success" not in rollout_metrics(episodes, step_rows(episodes))


def test_progress_counts_every_episode_once() -> None:
    play, _ = collector(GOOD, Counters())
    done: list[int] = []
    play.collect(TASKS, episodes_per_task=2, temperature=1.0, seed=0, progress=done.append)
    assert sum(done) == 4


def test_a_task_that_comes_twice_plays_other_episodes_each_time() -> None:
    play, engine = collector(GOOD, Counters())
    episodes = play.collect([TASKS[0], TASKS[0]], episodes_per_task=2, temperature=1.0, seed=0)
    assert len({episode.traj_uid for episode in episodes}) == 4
    seeds = [sampling.seed for sampling in engine.samplings]
    assert len(set(seeds)) == len(seeds)
