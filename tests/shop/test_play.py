from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console

from megagent.shop.play import action_of, main, play
from megagent.shop.visit import OpenShop, ShopOptions, open_shop
from tests.shop.visitors import way_to_win


@pytest.fixture(scope="module")
def shop() -> OpenShop:
    """Its first task is number 0."""
    return open_shop(ShopOptions(task=0))


def transcript(shop: OpenShop, lines: Sequence[str]) -> str:
    """What a session with these lines prints; it ends with the input if no line ends it."""
    output = io.StringIO()
    waiting = iter(lines)

    def read() -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    try:
        play(shop, Console(file=output, width=200), read)
    except EOFError:
        output.write("<end of input>")
    return output.getvalue()


def test_a_session_ends_with_the_score_and_each_component(shop: OpenShop) -> None:
    printed = transcript(shop, [*way_to_win(shop, 0), ":quit"])
    assert "Score 1.000 of 1 (won" in printed
    for component in ("attributes", "options", "price"):
        assert component in printed.split("Score 1.000")[1]


def test_a_number_clicks_the_button_that_has_it(shop: OpenShop) -> None:
    printed = transcript(shop, ["shirt", "2", "1", ":history", ":quit"])
    assert "Page 2 (" in printed
    history = printed.split("What you did")[1]
    assert [line.split(maxsplit=1)[1].strip() for line in history.splitlines()[2:5]] == [
        "search[shirt]",
        "click[next >]",
        "click[back to search]",
    ]


def test_typed_text_means_a_button_an_action_or_a_query(shop: OpenShop) -> None:
    visit = shop.visit(0)
    assert action_of("warm shirt", visit) == "search[warm shirt]"
    assert action_of("42", visit) == "search[42]"
    assert action_of("click[x]", visit) == "click[x]"
    visit.act("search[shirt]")
    assert action_of("1", visit) == "click[back to search]"
    assert action_of("Next >", visit) == "click[next >]"
    assert action_of(visit.page.offers[0].button.label, visit) == visit.page.offers[0].button.action
    assert action_of("warm shirt", visit) is None
    assert action_of("99", visit) is None
    assert action_of("¹", visit) is None


def test_what_is_not_on_the_page_changes_nothing(shop: OpenShop) -> None:
    printed = transcript(shop, ["shirt", "no such thing", "click[buy now]", ":dance", ":quit"])
    assert "no such thing: not on this page" in printed
    assert "click[buy now]: the page does not offer this" in printed
    assert ":dance: no such command" in printed
    assert "You left without buying anything" in printed


def test_the_agents_page_can_be_read(shop: OpenShop) -> None:
    printed = transcript(shop, ["shirt", ":observation", ":task", ":help", ":quit"])
    assert "'Back to Search' [SEP] 'Page 1 (Total results:" in printed
    assert "click[back to search]" in printed.split("admissible actions")[1]


def test_another_task_follows_a_purchase_or_new(shop: OpenShop) -> None:
    printed = transcript(shop, [*way_to_win(shop, 0), "what now", ":history", "", ":new", ":quit"])
    assert printed.count("Your task (") == 3
    assert printed.count("This visit has ended: Enter shops another task") == 2
    assert "click[buy now]" in printed.split("What you did")[1]


def test_markup_that_is_typed_or_sold_is_plain_text(shop: OpenShop) -> None:
    assert "[bold]x[/bold]" in transcript(shop, ["[bold]x[/bold]", ":quit"])


def test_the_end_of_the_input_ends_the_session(shop: OpenShop) -> None:
    assert transcript(shop, ["shirt"]).endswith("<end of input>")


@pytest.mark.parametrize("ending", [EOFError, KeyboardInterrupt])
def test_leaving_is_polite(
    ending: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(*_: object) -> str:
        raise ending

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", leave)
    main(ShopOptions(seed=1))
    assert capsys.readouterr().out.endswith("Goodbye.\n")


def test_a_script_can_be_piped(shop: OpenShop) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megagent", "shop", "play", "--task", "0"],
        input="\n".join(way_to_win(shop, 0)),
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert done.stderr == ""
    assert "> click[buy now]" in done.stdout
    assert "Score 1.000 of 1" in done.stdout
    assert done.stdout.endswith("Goodbye.\n")
    assert "\x1b" not in done.stdout
