"""The Porter stemmer as Lucene has it: the algorithm of 1980 with its author's later departures (bli, logi).

Source: M.F. Porter, "An algorithm for suffix stripping", Program 14(3), 1980, and https://tartarus.org/martin/PorterStemmer.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

_STEP2 = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble"),
    ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate"),
    ("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"),
    ("iviti", "ive"), ("biliti", "ble"), ("logi", "log"),
)  # fmt: skip
_STEP3 = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", ""),
)  # fmt: skip
# Longest first where one ends with another.
_STEP4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
)  # fmt: skip


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """The stem of a lower-case word. Words of one or two characters are their own stems."""
    if len(word) <= 2:
        return word
    for step in (_plurals, _past_and_gerund, _final_y, _double_suffix, _suffix, _ending, _final_e, _final_l):
        word = step(word)
    return word


def _consonants(word: str) -> list[bool]:
    """For each letter whether it counts as a consonant; y does after a vowel and at the start."""
    flags: list[bool] = []
    for letter in word:
        if letter in "aeiou":
            flags.append(False)
        elif letter == "y":
            flags.append(not flags or not flags[-1])
        else:
            flags.append(True)
    return flags


def _measure(stem_part: str) -> int:
    """How many times a vowel run is followed by a consonant run."""
    flags = _consonants(stem_part)
    return sum(1 for before, here in pairwise(flags) if here and not before)


def _has_vowel(stem_part: str) -> bool:
    return not all(_consonants(stem_part))


def _ends_double_consonant(word: str) -> bool:
    return len(word) >= 2 and word[-1] == word[-2] and _consonants(word)[-1]


def _ends_short(word: str) -> bool:
    """Ends consonant, vowel, consonant, the last one not w, x or y."""
    return len(word) >= 3 and _consonants(word)[-3:] == [True, False, True] and word[-1] not in "wxy"


def _plurals(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    if word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def _past_and_gerund(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for ending in ("ed", "ing"):
        if word.endswith(ending):
            if not _has_vowel(word[: -len(ending)]):
                return word
            word = word[: -len(ending)]
            if word.endswith(("at", "bl", "iz")):
                return f"{word}e"
            if _ends_double_consonant(word) and word[-1] not in "lsz":
                return word[:-1]
            if _measure(word) == 1 and _ends_short(word):
                return f"{word}e"
            return word
    return word


def _final_y(word: str) -> str:
    return f"{word[:-1]}i" if word.endswith("y") and _has_vowel(word[:-1]) else word


def _replace(word: str, table: tuple[tuple[str, str], ...]) -> str:
    for ending, replacement in table:
        if word.endswith(ending):
            part = word[: -len(ending)]
            return part + replacement if _measure(part) > 0 else word
    return word


def _double_suffix(word: str) -> str:
    return _replace(word, _STEP2)


def _suffix(word: str) -> str:
    return _replace(word, _STEP3)


def _ending(word: str) -> str:
    for ending in _STEP4:
        if word.endswith(ending):
            part = word[: -len(ending)]
            if ending == "ion" and not part.endswith(("s", "t")):
                continue
            return part if _measure(part) > 1 else word
    return word


def _final_e(word: str) -> str:
    if not word.endswith("e"):
        return word
    part = word[:-1]
    measure = _measure(part)
    return part if measure > 1 or (measure == 1 and not _ends_short(part)) else word


def _final_l(word: str) -> str:
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word
