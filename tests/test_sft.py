from __future__ import annotations

from pathlib import Path

import pytest

from megagent.config_load import load
from megagent.errors import ConfigError
from megagent.sft import main


def test_an_environment_without_scripted_episodes_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    config = load(["experiment=sokoban_tiny", f"sft.output={tmp_path / 'new' / 'warm'}"])
    with pytest.raises(
        ConfigError, match="env.name=sokoban: there are scripted episodes of webshop only; use env=webshop"
    ):
        main(config)
    assert list(tmp_path.iterdir()) == []
