"""From what a model wrote to the action an environment takes.

The reply is lower-cased; the action is what stands between the first `<action>` and the first `</action>`. It is valid
if it parses (a thought and an action in their tags, no CJK character) and the page offers it: an action that the page
does not offer changes nothing, and the penalty should say so. A reply without action tags does nothing. Under the rules
of verl-agent's WebShop it acts through its last characters instead, and parsing is enough to be valid.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megagent.config import ReplyRules

HONEST = ReplyRules()

# How much of a reply without action tags is handed to the environment, where the rules have it so.
TAIL_CHARACTERS = 20

_OPEN, _CLOSE = "<action>", "</action>"
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_CJK = re.compile(r"[\u4e00-\u9fff]")
_SEARCH = re.compile(r"search\[[^\n]*\S[^\n]*\]")


@dataclass(frozen=True)
class Projection:
    """What a reply means to the environment."""

    action: str  # what to execute, lower case; nothing for a reply without action tags
    parsed: bool  # a thought in <think> tags and an action in <action> tags are there, and no CJK character
    admissible: bool  # the page offers the action
    valid: bool  # both; under rules that do not ask what the page offers, parsed alone


def project(text: str, admissible: Sequence[str], rules: ReplyRules = HONEST) -> Projection:
    """Reads the action out of a model's reply.

    text: the decoded reply, special tokens already removed. admissible: the actions that the page offers; an entry
    that starts with `search[` stands for a search box and admits every query with a visible character in it.
    Never raises: any text is a reply.
    """
    lowered = text.lower()
    begin, end = lowered.find(_OPEN), lowered.find(_CLOSE)
    if begin >= 0 and end >= 0:
        action = lowered[begin + len(_OPEN) : end].strip()
        if rules.whole_thought:
            parsed = bool(action) and _THOUGHT.search(lowered) is not None
        else:
            parsed = "<think>" in text and "</think>" in text
        parsed = parsed and _CJK.search(text) is None
    else:
        action, parsed = lowered[-TAIL_CHARACTERS:] if rules.tail_acts else "", False
    offered = is_admissible(action, admissible)
    return Projection(action, parsed, offered, parsed and (offered or not rules.valid_if_offered))


def is_admissible(action: str, admissible: Sequence[str]) -> bool:
    """Whether the page offers `action` (lower case): it is listed, or it is a query and there is a search box."""
    if any(action == offered.lower() for offered in admissible):
        return True
    has_search_box = any(offered.startswith("search[") for offered in admissible)
    return has_search_box and _SEARCH.fullmatch(action) is not None
