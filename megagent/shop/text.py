"""Text of strangers (catalogues, models) made fit to be shown: no byte of it moves a cursor or turns a line round."""

from __future__ import annotations

import re
from typing import Any

# Control characters but line feed and tab, the marks that set the direction of writing, and lone surrogates.
_UNSHOWABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_PICTURES = 0x2400  # the block of control pictures begins with the one of NUL


def visible(text: str) -> str:
    """`text` with a picture in place of each control character: an escape becomes ␛, a C1 or direction mark �."""
    return _UNSHOWABLE.sub(_picture, text)


def all_visible(value: Any) -> Any:
    """A JSON value with every text in it made `visible`, keys included."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(str(key)): all_visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_visible(item) for item in value]
    return value


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "\u2421" if code == 0x7F else "\ufffd"
