from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import megagent.envs
from megagent.config import EnvConfig
from megagent.envs import WORLDS, build_world
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.world import WebShopWorld
from megagent.errors import ConfigError

ALLOWED = {"numpy", "regex", "megagent.config", "megagent.errors", "megagent.envs"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
    return names


def test_environments_import_only_the_standard_library_numpy_and_regex():
    for path in Path(megagent.envs.__file__).parent.rglob("*.py"):
        for name in imported(path):
            standard = name.split(".")[0] in sys.stdlib_module_names
            assert standard or any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED), (
                f"{path} imports {name}"
            )


def test_the_registry_builds_the_world_of_that_name():
    assert "webshop" in WORLDS
    assert isinstance(build_world(WebShopConfig()), WebShopWorld)


def test_a_configuration_of_another_environment_is_refused():
    with pytest.raises(ConfigError, match="env.name=webshop: a WebShopConfig is wanted, and this is a EnvConfig"):
        build_world(EnvConfig(name="webshop"))


def test_an_unknown_environment_is_named_with_the_closest_known_one():
    with pytest.raises(ConfigError, match=r"env.name=webshp: no such environment \(did you mean webshop\?\)"):
        build_world(EnvConfig(name="webshp"))
