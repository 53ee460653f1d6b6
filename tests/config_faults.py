"""What loading a configuration with some overrides complains about."""

from __future__ import annotations

from typing import Any

import pytest

from megagent.config_load import load
from megagent.errors import ConfigError

QWEN_7B = "model.path=Qwen/Qwen2.5-7B-Instruct"


def problems(*overrides: str, command: Any = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(list(overrides), command)
    return caught.value.problems


def only_problem(*overrides: str, command: Any = None) -> str:
    found = problems(*overrides, command=command)
    assert len(found) == 1, found
    return found[0]
