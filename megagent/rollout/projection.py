"""From what a model wrote to the action an environment takes.

The rules are those of the WebShop manager that the seed recipe uses: the reply is lower-cased, the action is what
stands between the first `<action>` and the first `</action>`, and a reply without both tags still acts through its last
characters (so a bare `click[buy now]` buys) but counts as invalid. One rule is stricter: an action that the page does
not offer is invalid too, because it changes nothing and the penalty should say so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# How much of a reply without action tags is handed to the environment.
TAIL_CHARACTERS = 20

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_CJK = re.compile(r"[\u4e00-\u9fff]")
_SEARCH = re.compile(r"search\[[^\n]*\S[^\n]*\]")


@dataclass(frozen=True)
class Projection:
    """What a reply means to the environment."""

    action: str  # what to execute, lower case; for a reply that does not parse, its last characters
    valid: bool  # it parses, holds no CJK character, and the page offers the action
    parsed: bool  # a thought in <think> tags and an action in <action> tags are there


def project(text: str, admissible: Sequence[str]) -> Projection:
    """Reads the action out of a model's reply.

    text: the decoded reply, special tokens already removed. admissible: the actions that the page offers; an entry
    that starts with `search[` stands for a search box and admits every query with a visible character in it.
    Never raises: any text is a reply.
    """
    lowered = text.lower()
    begin, end = lowered.find("<action>"), lowered.find("</action>")
    if begin < 0 or end < 0:
        return Projection(action=lowered[-TAIL_CHARACTERS:].strip(), valid=False, parsed=False)
    action = lowered[begin + len("<action>") : end].strip()
    parsed = bool(action) and _THOUGHT.search(lowered) is not None
    valid = parsed and _CJK.search(text) is None and is_admissible(action, admissible)
    return Projection(action=action, valid=valid, parsed=parsed)


def is_admissible(action: str, admissible: Sequence[str]) -> bool:
    """Whether the page offers `action` (lower case): it is listed, or it is a query and there is a search box."""
    if any(action == offered.lower() for offered in admissible):
        return True
    has_search_box = any(offered.startswith("search[") for offered in admissible)
    return has_search_box and _SEARCH.fullmatch(action) is not None
