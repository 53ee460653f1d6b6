"""Which words of a product title are nouns, by rule, for catalogues without a table from a tagger.

Titles are strings of names and kinds of things: a tagger calls nearly every word a noun or a name, adjectives of a
title in capitals included. So a title is taken apart as spaCy does it, and every word counts unless it is a function
word or a number. There is no list of adjectives or other words to be left out: one that was made from half of 1,000
real titles lost on the other half as much recall as it gained precision. docs/dev/search.md has the figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNITS = r"[kdcmµn]?m[²³]?|ha|yd|in|ft|k?g|[mµ]g|t|lb|oz|m/s|km/h|kmh|mph|h?Pa|mbar|[MmKkGgTt]b|[MKGT]B|[TGMK%]"
_LETTER = r"[^\W\d_]"
_MARKS = r"[\"'`‘’“”«»,:;!?¡¿()\[\]{}<>_#*&【】「」，（）]"
# What spaCy's English rules cut off before and after a word, and where inside it they part it.
_PREFIX = re.compile(rf"{_MARKS}|[§%=—–$£€¥°●★™®©]|\+(?!\d)|\.\.+|…")
_SUFFIX = re.compile(
    rf"(?:['’][sS]|{_MARKS}|[—–°●★™®©]|\.\.+|…|(?<=\d)(?:\+|{_UNITS})"
    r"|(?<=[0-9a-z)\]\"'%²+-])\.|(?<=[A-Z][A-Z])\.)$"
)
_INFIX = re.compile(
    rf"(\.\.+|…|[°●★™®©]|(?<=\d)[-+*^](?=[\d-])|(?<=[a-z\"'])\.(?=[A-Z\"'])|(?<={_LETTER}),(?={_LETTER})"
    rf"|(?:(?<={_LETTER})|(?<=\d))(?:--|[-–—~:<>=/])(?={_LETTER}))"
)
# 20ml, 3d and 10pcs count, 2nd and 18x18 do not.
_AMOUNT = re.compile(r"[\d.]+(?!(?:st|nd|rd|th|p|xl|x\d.*)$)[a-z]+")
_LONGEST = 200  # characters; a longer word is no word, and is left whole
_ABBREVIATIONS = frozenset(("co.", "corp.", "dr.", "inc.", "jr.", "ltd.", "mr.", "mrs.", "ms.", "st.", "vs."))
_SIGNS = ("|", "%", "°")  # nouns to the tagger

_FUNCTION_WORDS_TEXT = (
    "a about after all an and any are as at be because been before being between both but by can could did do does "
    "down during each either etc every few for from get had has have he her here his how i if in into is it its just "
    "like made make makes many may me more most my neither no nor not of off on once one only onto or other our out "
    "over own per same several she should so some such than that the their them then there these they this those "
    "through to too two three four five six seven eight nine ten under until up upon us very was we well were what "
    "when where which while who will with within without would you your"
)
_NO_NOUNS = frozenset(_FUNCTION_WORDS_TEXT.split())


def title_nouns(title: str) -> tuple[str, ...]:
    """The words of `title` that pass for nouns, lower case, in order, repetitions kept."""
    return tuple(token.lower() for token in tokens(title) if _passes(token))


def _passes(token: str) -> bool:
    if token == "x":  # between two sizes; a large one is a name
        return False
    if token[0].isalpha():
        return token.lower() not in _NO_NOUNS
    return token in _SIGNS or _AMOUNT.fullmatch(token.lower()) is not None


def tokens(title: str) -> list[str]:
    """The title's words and signs, parted as spaCy's English tokenizer does it, but for rarer abbreviations."""
    found: list[str] = []
    for word in title.split():
        if len(word) > _LONGEST:
            found.append(word)
            continue
        while word and (match := _PREFIX.match(word)):
            found.append(match.group())
            word = word[match.end() :]
        suffixes: list[str] = []
        while word and word.lower() not in _ABBREVIATIONS and (match := _SUFFIX.search(word)):
            suffixes.append(match.group())
            word = word[: match.start()]
        found += filter(None, _INFIX.split(word))
        found += suffixes[::-1]
    return found


class RuleTagger:
    """`title_nouns` in the place of a tagger."""

    name = "rules"

    def nouns(self, titles: Sequence[str]) -> list[tuple[str, ...]]:
        """[titles] the nouns of each title, lower case, in order, repetitions kept."""
        return [title_nouns(title) for title in titles]
