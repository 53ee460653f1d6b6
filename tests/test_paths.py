from __future__ import annotations

from pathlib import Path

import pytest

from megagent.errors import MegagentError
from megagent.paths import expanded


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert expanded("~/runs") == Path("/home/somebody/runs")


def test_the_home_folder_of_nobody_is_told():
    with pytest.raises(MegagentError, match="~no-such-user is the home folder of no user here; write the path"):
        expanded("~no-such-user/runs")
