from __future__ import annotations

import unicodedata

import pytest

from megagent.shop.text import all_visible, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a \x1b[2J screen wiped", "a ␛[2J screen wiped"),
        ("bell\x07 null\x00 delete\x7f", "bell␇ null␀ delete␡"),
        ("back\rto the start", "back␍to the start"),
        ("\x9b31m is an escape of one byte", "\ufffd31m is an escape of one byte"),
        ("turned \u202e round", "turned \ufffd round"),
        ("half a pair \ud800", "half a pair \ufffd"),
        ("two\nlines,\ta tab, café, 日本, 🙂", "two\nlines,\ta tab, café, 日本, 🙂"),
    ],
)
def test_what_would_move_the_cursor_is_shown_as_a_sign(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_no_control_character_but_line_feed_and_tab_is_left() -> None:
    shown = visible("".join(map(chr, range(0x110000))))
    assert {character for character in shown if unicodedata.category(character) in ("Cc", "Cs")} == {"\n", "\t"}


def test_every_text_of_a_json_value_is_made_visible() -> None:
    assert all_visible({"\x1b": ["\x1b", 1, None, {"a": "\x1b"}]}) == {"␛": ["␛", 1, None, {"a": "␛"}]}
