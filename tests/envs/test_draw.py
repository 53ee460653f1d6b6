from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megagent.envs.base import Task, draw_tasks


def panel(size: int) -> list[Task]:
    return [Task(uid=f"t{index}", split="train", key=str(index)) for index in range(size)]


@given(size=st.integers(1, 40), count=st.integers(1, 16), seed=st.integers(0, 1000))
def test_every_task_comes_once_before_any_comes_twice(size: int, count: int, seed: int) -> None:
    tasks = panel(size)
    iterations = -(-size // count)
    drawn = [task.uid for iteration in range(1, iterations + 1) for task in draw_tasks(tasks, count, seed, iteration)]
    assert set(Counter(drawn[:size]).values()) == {1}
    assert len(drawn) == iterations * count


def test_a_resumed_run_draws_what_an_unbroken_one_would() -> None:
    tasks = panel(20)
    assert draw_tasks(tasks, 6, seed=3, iteration=5) == draw_tasks(tasks, 6, seed=3, iteration=5)
    assert draw_tasks(tasks, 6, seed=3, iteration=5) != draw_tasks(tasks, 6, seed=4, iteration=5)


def test_every_validation_plays_the_same_tasks() -> None:
    held_out = [Task(uid=f"t{index}", split="validation", key=str(index)) for index in range(20)]
    assert draw_tasks(held_out, 6, seed=3, iteration=5) == held_out[:6]
    assert draw_tasks(held_out, 60, seed=4, iteration=1) == held_out
