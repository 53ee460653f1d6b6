from __future__ import annotations

import io

import pytest
from rich.console import Console as Terminal

from megagent.observe.console import HEADER, HEADER_EVERY, Console

METRICS = {
    "episode/success_rate": 0.427,
    "episode/length/mean": 6.25,
    "episode/reward/mean": 4.27,
    "actor/kl_loss": 0.0123,
    "actor/entropy": 0.75,
    "actor/grad_norm": 0.5,
    "rollout/tokens_per_s": 5120.4,
    "timing_s/iteration": 12.34,
}
VALIDATION = {
    "val/sampled/success_rate": 0.5,
    "val/sampled/success_low": 0.414,
    "val/sampled/success_high": 0.586,
    "val/greedy/success_rate": 0.75,
    "val/greedy/success_low": 0.668,
    "val/greedy/success_high": 0.818,
    "val/sampled/tasks": 128.0,
}


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


def plain(screen: io.StringIO, iterations: int = 12) -> Console:
    return Console(iterations, terminal=Terminal(file=screen))


def terminal(screen: io.StringIO) -> Console:
    return Console(12, terminal=Terminal(file=screen, force_terminal=True, width=120, color_system="truecolor"))


def test_an_iteration_is_one_line_under_the_header(screen: io.StringIO) -> None:
    with plain(screen) as console:
        console.iteration(3, METRICS)
    header, line = screen.getvalue().splitlines()
    assert header == HEADER
    assert line.split() == ["3", "42.7", "6.2", "4.27", "0.0123", "0.750", "0.500", "5,120", "12.3"]


def test_every_figure_stands_under_its_title(screen: io.StringIO) -> None:
    with plain(screen) as console:
        console.iteration(3, METRICS)
    header, line = screen.getvalue().splitlines()
    assert len(header) == len(line)
    for title, figure in zip(header.split(), line.split(), strict=True):
        assert header.index(title) + len(title) == line.index(f" {figure}") + 1 + len(figure)


def test_a_figure_that_is_missing_is_a_dash(screen: io.StringIO) -> None:
    with plain(screen) as console:
        console.iteration(1, {})
    assert screen.getvalue().splitlines()[1].split() == ["1", *"--------"]


def test_validation_shows_sampled_and_greedy_with_their_intervals(screen: io.StringIO) -> None:
    with plain(screen) as console:
        console.validation(6, VALIDATION)
    _, sampled, greedy = screen.getvalue().splitlines()
    assert sampled == "    6 held-out sampled  50.0% success  (95% interval 41.4-58.6%, 128 tasks)"
    assert greedy == "    6 held-out greedy   75.0% success  (95% interval 66.8-81.8%)"


def test_a_warning_is_a_line_of_its_own(screen: io.StringIO) -> None:
    with plain(screen) as console:
        console.warn("step 3 of goal[7] is off")
    assert screen.getvalue() == "warning: step 3 of goal[7] is off\n"


def test_a_long_log_repeats_its_header(screen: io.StringIO) -> None:
    with plain(screen, iterations=100) as console:
        for number in range(100):
            console.iteration(number, METRICS)
    lines = screen.getvalue().splitlines()
    assert [index for index, line in enumerate(lines) if line == HEADER] == [
        0,
        HEADER_EVERY + 1,
        2 * (HEADER_EVERY + 1),
    ]


def test_without_a_terminal_there_are_no_bars_and_no_control_characters(screen: io.StringIO) -> None:
    with plain(screen) as console:
        with console.phase("rollout", total=96) as advance:
            advance(96)
        console.iteration(1, METRICS)
        console.validation(1, VALIDATION)
        console.note("run folder: runs/x")
    assert all(character == "\n" or character.isprintable() for character in screen.getvalue())
    assert "rollout" not in screen.getvalue()


def test_on_a_terminal_a_phase_is_a_bar_that_goes_away(screen: io.StringIO) -> None:
    with terminal(screen) as console:
        with console.phase("rollout", total=96) as advance:
            advance(40)
            console._progress.refresh()
            during = screen.getvalue()
        console.iteration(1, METRICS)
        console._progress.refresh()
        screen.truncate(0)
        console._progress.refresh()
    assert "rollout" in during
    assert "40/96" in during
    assert "rollout" not in screen.getvalue()
    assert "1/12" in screen.getvalue()


def test_a_bar_goes_away_when_its_phase_fails(screen: io.StringIO) -> None:
    console = terminal(screen)
    with pytest.raises(ZeroDivisionError), console, console.phase("update", total=3):
        raise ZeroDivisionError
    assert [task.description for task in console._progress.tasks] == ["run"]
    assert screen.getvalue().endswith("\x1b[?25h" + screen.getvalue().rpartition("\x1b[?25h")[2])  # the cursor is back


def test_progress_may_go_on_without_a_total(screen: io.StringIO) -> None:
    with terminal(screen) as console, console.phase("start") as advance:
        advance(2)
        console._progress.refresh()
        assert "start" in screen.getvalue()


def test_a_console_that_is_switched_off_prints_nothing(screen: io.StringIO) -> None:
    with Console(12, enabled=False, terminal=Terminal(file=screen, force_terminal=True)) as console:
        with console.phase("rollout", total=2) as advance:
            advance(1)
        console.iteration(1, METRICS)
        console.validation(1, VALIDATION)
        console.note("note")
    assert screen.getvalue() == ""
