from __future__ import annotations

import pytest

from megagent.envs.webshop import pages
from megagent.envs.webshop.pages import Part
from megagent.envs.webshop.rules import HONEST, ORIGINAL

from .shelf import product
from .visits import acted, visit


@pytest.mark.parametrize(("text", "segments"), [("", []), (" ", [""]), (" \n", []), (" x ", ["x"])])
def test_blank_texts_make_the_segments_of_the_original(text, segments):
    session = acted(visit(name=text), "search[shirt]")
    assert session.segments()[3:] == ["B1", *segments, "$10.5", "B2", *segments, "$10.5"]


def test_an_empty_bullet_is_an_empty_segment():
    session = acted(visit(small_description=["", "x", " \n"]), "search[shirt]", "click[b1]", "click[features]")
    assert session.segments()[2:] == ["", "x"]


def test_text_is_quoted_for_the_agent_and_stands_below_the_task_in_the_original():
    session = acted(visit(), "search[shirt]", "click[b1]", "click[features]")
    assert session.anchor() == "'Back to Search' [SEP] '< Prev' [SEP] 'washable' [SEP] 'light'"
    assert session.original_text() == (
        "Instruction: [SEP] find it [SEP] Back to Search [SEP] < Prev [SEP] washable [SEP] light"
    )


def test_the_originals_search_page_says_the_name_of_the_shop():
    assert visit().original_text() == "WebShop [SEP] Instruction: [SEP] find it [SEP] Search"
    assert visit(rich=True).original_text() == "WebShop\nInstruction: \nfind it\n[button] Search [button_]\n"


def test_text_rich_brackets_buttons_and_marks_products_that_were_opened():
    session = acted(visit(rich=True), "search[shirt]", "click[b2]", "click[< prev]")
    assert session.anchor() == (
        "[button] Back to Search [button_]\n"
        "Page 1 (Total results: 5)\n"
        "[button] Next > [button_]\n"
        "\n[button] B1 [button_]\n"
        "Blue Cotton Shirt\n"
        "$10.5\n"
        "\n[clicked button] B2 [clicked button_]\n"
        "Blue Cotton Shirt\n"
        "$10.5\n"
    )
    again = acted(session, "click[back to search]", "search[shirt]")
    assert "clicked" not in again.anchor()


def test_text_rich_marks_what_is_selected_and_says_it_first():
    session = acted(visit(rich=True), "search[shirt]", "click[b1]", "click[s]", "click[blue]")
    expected = (
        "[button] Back to Search [button_]\n"
        "[button] < Prev [button_]\n"
        "size\n"
        "  [clicked button] s [clicked button_]\n"
        "  [button] l [button_]\n"
        "color\n"
        "  [button] red [button_]\n"
        "  [clicked button] blue [clicked button_]\n"
        "Blue Cotton Shirt\n"
        "Price: $10.5\n"
        "Rating: N.A.\n"
        "[button] Description [button_]\n"
        "[button] Features [button_]\n"
        "[button] Reviews [button_]\n"
        "[button] Buy Now [button_]\n"
    )
    said = "You have clicked blue.\nYou have clicked s.\n"
    assert session.anchor() == said + expected
    assert session.original_text() == f"{said}Instruction:\nfind it\n{expected}"


def test_text_rich_does_not_strip_plain_texts():
    session = acted(visit(rich=True, name=" x "), "search[washable]", "click[b1]")
    assert "\n x \nPrice:" in session.anchor()
    assert acted(session, "click[features]").anchor().endswith("\n washable\n light\n")


def marked(*actions: str, rules=ORIGINAL, query: str = "shirt", **fields) -> list[str]:
    session = acted(visit(rules, rich=True, **fields), f"search[{query}]", "click[b1]", *actions)
    return [line.split()[2] for line in session.anchor().splitlines() if line.startswith("  [clicked")]


NAMES = {"Red": [{"value": "\u00e9cru"}, {"value": "plain"}], "Color": [{"value": "Red"}, {"value": "Blue"}]}


def test_in_the_original_a_value_is_marked_if_its_quoted_text_is_anywhere_in_the_address():
    assert marked("click[blue]") == ["blue"]
    assert marked("click[plain]", customization_options=NAMES) == ["plain", "red"]
    assert marked("click[\u00e9cru]", customization_options=NAMES) == ["red"]
    assert marked(query='a "red" shirt') == ["red"]


def test_a_value_is_marked_if_it_is_selected():
    assert marked("click[plain]", rules=HONEST, customization_options=NAMES) == ["plain"]
    assert marked("click[\u00e9cru]", rules=HONEST, customization_options=NAMES) == ["\u00e9cru"]
    assert marked(rules=HONEST, query='a "red" shirt') == []


def test_the_last_page_writes_options_as_the_original_does():
    parts = pages.done_parts("B1", {"size": "9' & <up>", "color": "\u00e9cru"}, 0.5)
    line = pages.plain(parts).split(" [SEP] ")[8]
    assert line == r"""{"color": "\u00e9cru", "size": "9\u0027 \u0026 \u003cup\u003e"}"""
    assert pages.rich(parts).startswith("Thank you for shopping with us!\nYour code: \nNone\n (Paste it in")


def test_a_selected_option_is_said_before_the_page():
    parts = [Part("text", "a"), Part("option", "b", clicked=True), Part("option", "c", clicked=True)]
    assert pages.rich(parts).splitlines()[:3] == ["You have clicked c.", "You have clicked b.", "a"]


def test_every_value_has_a_label_of_its_own_also_where_one_reads_as_another_name_and_value():
    options = {"a": ("a: a", "a"), "": ("a", "buy now"), "b": ("a: a (2)",)}
    labels = pages.option_labels(product("B1", options=options), HONEST)
    assert sorted(labels.values()) == sorted((name, value) for name, values in options.items() for value in values)


@pytest.mark.parametrize(
    ("page", "segments"),
    [
        ("'Back' [SEP] 'it's' [SEP] ''", ["Back", "it's", ""]),
        ("'Search'", ["Search"]),
        ("#_#\n#@#", ["#_#\n#@#"]),
        ("Thank you [SEP] asin", ["Thank you", "asin"]),
        ("", [""]),
        ("'", ["'"]),
    ],
)
def test_a_recorded_page_is_taken_apart(page, segments):
    assert pages.segments_of(page) == segments
