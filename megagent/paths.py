"""Paths as a configuration names them."""

from __future__ import annotations

from pathlib import Path

from megagent.errors import MegagentError


def expanded(path: str) -> Path:
    """`path`, where ~ and ~name at the beginning stand for home folders.

    Raises MegagentError (a sentence without the key that names the path) if there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise MegagentError(
            f"{path.partition('/')[0]} is the home folder of no user here; write the path without ~"
        ) from None
