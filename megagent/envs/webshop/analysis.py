"""Text to search terms, as Lucene's English analyzer does it: words, lower case, stop words, stems.

Word boundaries are those of Unicode UAX #29. Lucene counts pictographs as words, by the property list of Unicode 11,
which is wider than today's; a token more or less shifts document lengths and with them the order of results.

A space always ends a word, so a text is taken apart piece by piece between spaces, and shops repeat their pieces: most
are found in a cache. A piece in ASCII goes through a plain regular expression, any other through the full rules; a test
holds the two against each other.
"""

from __future__ import annotations

import re
from functools import lru_cache

import regex

from megagent.envs.webshop.stemmer import stem

_PICTOGRAPHS = (
    r"\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u2388\u23cf\u23e9-\u23f3"
    r"\u23f8-\u23fa\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705"
    r"\u2708-\u2712\u2714\u2716\u271d\u2721\u2728\u2733\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767"
    r"\u2795-\u2797\u27a1\u27b0\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299"
    r"\U0001f000-\U0001f0ff\U0001f10d-\U0001f10f\U0001f12f\U0001f16c-\U0001f171\U0001f17e\U0001f17f\U0001f18e"
    r"\U0001f191-\U0001f19a\U0001f1ad-\U0001f1ff\U0001f201-\U0001f20f\U0001f21a\U0001f22f\U0001f232-\U0001f23a"
    r"\U0001f23c-\U0001f23f\U0001f249-\U0001f3fa\U0001f400-\U0001f53d\U0001f546-\U0001f64f\U0001f680-\U0001f6ff"
    r"\U0001f774-\U0001f77f\U0001f7d5-\U0001f7ff\U0001f80c-\U0001f80f\U0001f848-\U0001f84f\U0001f85a-\U0001f85f"
    r"\U0001f888-\U0001f88f\U0001f8ae-\U0001f8ff\U0001f90c-\U0001f93a\U0001f93c-\U0001f945\U0001f947-\U0001fffd"
)
_BOUNDARY = regex.compile(r"\b", regex.WORD | regex.VERSION1)
# Halfwidth voiced marks are alphabetic by property, and make no word by themselves.
_WORD = regex.compile(rf"[[\p{{Alphabetic}}\p{{Nd}}\p{{Han}}{_PICTOGRAPHS}]--[\uff9e\uff9f]]", regex.VERSION1)
# UAX #29 for ASCII: letters, digits and underscores, joined by one sign between two letters or between two digits.
_ASCII_SEGMENT = re.compile(r"\w(?:\w|(?<=[A-Za-z])[.':](?=[A-Za-z])|(?<=[0-9])[.',;](?=[0-9]))*", re.ASCII)
# What joins to the character before it, a space included: there the pieces of a text depend on each other.
_JOINS_A_SPACE = regex.compile(r" \p{WB=WSegSpace}*[\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]")
_LONGEST = 255  # characters; Lucene cuts longer words into pieces
_CACHED_PIECES = 1 << 16
_STOP_WORDS_TEXT = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
_STOP_WORDS = frozenset(_STOP_WORDS_TEXT.split())
_POSSESSIVES = ("'s", "\u2019s", "\uff07s", "'S", "\u2019S", "\uff07S")


def terms(text: str) -> list[str]:
    """The search terms of a text in order, repetitions kept."""
    return [term for piece in pieces(text) for term in _cached_terms(piece)]


def pieces(text: str) -> list[str]:
    """Parts of `text` whose terms, one after the other, are the terms of the text."""
    if not text.isascii() and _JOINS_A_SPACE.search(text):
        return [text]
    return text.split(" ")


def piece_terms(piece: str) -> tuple[str, ...]:
    """The search terms of one of `pieces`."""
    segments = ascii_segments(piece) if piece.isascii() else unicode_segments(piece)
    return tuple(term for segment in segments for term in segment_terms(segment))


_cached_terms = lru_cache(maxsize=_CACHED_PIECES)(piece_terms)


def segment_terms(segment: str) -> list[str]:
    """What a word between boundaries gives: no term for a stop word, several for one that is too long."""
    found = []
    for start in range(0, len(segment), _LONGEST):
        word = segment[start : start + _LONGEST]
        if word.endswith(_POSSESSIVES):
            word = word[:-2]
        word = word.lower()
        if word not in _STOP_WORDS:
            found.append(stem(word))
    return found


def ascii_segments(text: str) -> list[str]:
    """The words of an ASCII text."""
    return [segment for segment in _ASCII_SEGMENT.findall(text) if segment[0] != "_" or segment.strip("_")]


def unicode_segments(text: str) -> list[str]:
    """The words of any text, by the rules of UAX #29 in full."""
    return [segment for segment in _BOUNDARY.split(text) if _WORD.search(segment)]
