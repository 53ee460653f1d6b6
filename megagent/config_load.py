"""Reads a configuration: Hydra composes configs/ and the overrides, the schema of megagent.config types the result.

Nothing stops at the first fault. Every override that cannot be read, unknown key, wrong type and unknown choice is
collected in a `Faults`, together with the impossible combinations that `megagent.config_check` finds, and reported in
one `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megagent.config import Config, EnvConfig
from megagent.config_check import Command, Faults, check
from megagent.envs.base import WORLDS
from megagent.errors import ConfigError
from megagent.model_source import model_folder as model_folder

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

KIND = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# Settings of other trainers that cut or bend the distribution which tokens are sampled from.
TRUNCATIONS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def configs_dir() -> Path:
    """The folder of the Hydra groups: inside the installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError([f"{package / 'configs'}: the configuration files are missing; install megagent again"])


def load(overrides: Sequence[str], command: Command | None = None) -> Config:
    """The configuration of `overrides` (`experiment=webshop_tiny`, `rollout.tp=2`), complete and checked.

    command: "train" or "sft" also checks what that command finds on this machine (run folder, weights), so call it
    just before starting; None checks the configuration alone.
    Raises ConfigError with all faults.
    """
    config, faults = read(overrides)
    check(config, faults, command)
    faults.report()
    return config


def read(overrides: Sequence[str]) -> tuple[Config, Faults]:
    """The typed configuration and the faults of its form. A faulty key keeps the schema's default."""
    faults = Faults()
    tree, edits = _compose(overrides, faults)
    chosen = tree.get("env", {}).get("name")
    for key, value in edits:
        if key == "env.name" and isinstance(value, str) and value in WORLDS and chosen not in (value, None):
            faults.add(
                f"env.name={value}: the other keys of env would still be those of {chosen}; use env={value}", key
            )
        else:
            _put(tree, key, value)
    return _typed(tree, faults), faults


# ---------------------------------------------------------------------------------------------------------------------
# Hydra: overrides and groups
# ---------------------------------------------------------------------------------------------------------------------


def _compose(overrides: Sequence[str], faults: Faults) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Composes the files for the chosen groups. Returns their tree and the remaining (key, value) overrides."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    with initialize_config_dir(version_base="1.3", config_dir=str(configs_dir())):
        choices, edits = _sort_overrides(overrides, GlobalHydra.instance().config_loader(), faults)
        try:
            composed = compose(config_name="config", overrides=choices)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            faults.add(f"configs/ cannot be composed: {' '.join(str(error).split())}")
            return {}, edits
    return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False)), edits


def _sort_overrides(
    overrides: Sequence[str], loader: ConfigLoader, faults: Faults
) -> tuple[list[str], list[tuple[str, Any]]]:
    """Splits overrides into choices of groups, which Hydra applies, and values of keys, which `_put` applies."""
    from hydra.core.object_type import ObjectType
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    groups = [group for group in loader.list_groups("") if group != "hydra"]
    choices: list[str] = []
    edits: list[tuple[str, Any]] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            faults.add(f"{text}: not an override; write key=value, and quote a value with special characters")
            continue
        key = override.key_or_group
        if override.is_delete():
            faults.add(f"{text}: a key cannot be removed; set the value that you want instead")
        elif override.is_sweep_override():
            faults.add(f"{text}: several values, but a run has one configuration; start one run for each value")
        elif key in groups:
            options = loader.get_group_options(key, ObjectType.CONFIG)
            choice = _choice(override, options, faults)
            if choice is not None:
                choices.append(choice)
        else:
            edits.append((key, override.value()))
    return choices, edits


def _choice(override: Override, options: list[str], faults: Faults) -> str | None:
    """`group=option` for Hydra, or None and a fault if the group has no such option."""
    group, option = override.key_or_group, override.value()
    if option in options:
        return f"{group}={option}"
    hint = _did_you_mean(str(option), options)
    faults.add(f"{group}={_show(option)}: configs/{group} has no such choice{hint}; it has {', '.join(options)}", group)
    return None


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets tree[a][b] for the dotted key a.b; a mapping is merged into what is there. `_typed` judges the result."""
    *sections, last = key.split(".")
    for section in sections:
        below = tree.get(section)
        if not isinstance(below, dict):
            below = tree[section] = {}
        tree = below
    if isinstance(value, Mapping) and isinstance(tree.get(last), dict):
        for name, inner in value.items():
            _put(tree[last], str(name), inner)
    else:
        tree[last] = value


# ---------------------------------------------------------------------------------------------------------------------
# The schema: known keys and types
# ---------------------------------------------------------------------------------------------------------------------


def schema_keys(
    env: type[EnvConfig] = EnvConfig, schema: type = Config, prefix: str = ""
) -> Iterator[tuple[str, type]]:
    """(dotted key, type) of every value of the schema, in order. env: what the environment's section holds."""
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        kind = env if hints[item.name] is EnvConfig else hints[item.name]
        if dataclasses.is_dataclass(kind):
            yield from schema_keys(env, cast(type, kind), f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, kind


def _environment(tree: Mapping[str, Any]) -> type[EnvConfig]:
    """The configuration class of the environment that the tree names; of the one that is meant, if it is mistyped."""
    section = tree.get("env")
    name = str(section.get("name", EnvConfig.name)) if isinstance(section, Mapping) else EnvConfig.name
    known = [name] if name in WORLDS else difflib.get_close_matches(name, WORLDS, n=1)
    return WORLDS[known[0] if known else EnvConfig.name].config


def _typed(tree: dict[str, Any], faults: Faults) -> Config:
    """The tree merged into the schema, key by key, so that one faulty key hides no other."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    env = _environment(tree)
    kinds = dict(schema_keys(env))
    schema = Config(env=env())
    typed = cast(DictConfig, OmegaConf.structured(schema))
    for key, value in _leaves(tree, kinds):
        if key not in kinds:
            faults.add(_unknown(key, value, kinds), key)
            continue
        try:
            OmegaConf.update(typed, key, value)
        except OmegaConfBaseException:
            faults.add(f"{key}={_show(value)}: must be {KIND[kinds[key]]}", key)
            OmegaConf.update(typed, key, OmegaConf.select(OmegaConf.structured(schema), key))
    for key, kind in kinds.items():  # interpolations can only be followed when every key has its value
        node = typed
        *sections, last = key.split(".")
        for section in sections:
            node = node[section]
        if not OmegaConf.is_interpolation(node, last):
            continue
        try:
            node[last]
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)
            reason = " ".join(str(error).split("\n")[0].split())
            faults.add(f"{key}={cast(dict[str, Any], raw)[last]}: cannot be resolved to {KIND[kind]} ({reason})", key)
            node[last] = {int: 1, float: 1.0, bool: False, str: ""}[kind]
    return cast(Config, OmegaConf.to_object(typed))


def _leaves(tree: Mapping[str, Any], kinds: Mapping[str, type], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of the tree; a mapping in the place of a value is yielded whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_section = any(known.startswith(f"{key}.") for known in kinds)
        if isinstance(value, Mapping) and (is_section or (value and key not in kinds)):
            yield from _leaves(value, kinds, f"{key}.")
        else:
            yield key, value


def _unknown(key: str, value: Any, kinds: Mapping[str, type]) -> str:
    inside = [known for known in kinds if known.startswith(f"{key}.")]
    if inside:
        return f"{key}={_show(value)}: {key} is a section; set its keys ({', '.join(inside[:3])}, ...)"
    parents = [known for known in kinds if key.startswith(f"{known}.")]
    if parents:
        return f"{key}: unknown key ({parents[0]} is a value, not a section)"
    others = [name for name, entry in WORLDS.items() if key in dict(schema_keys(entry.config))]
    if others:
        return (
            f"{key}: not a key of this environment but of {', '.join(others)}; choose it with env=<file of configs/env>"
        )
    if key.rsplit(".", 1)[-1] in TRUNCATIONS:
        return (
            f"{key}: unknown key: rollouts are sampled from the whole distribution, which the log-probs and ratios of "
            "the trainer are of; set rollout.temperature only"
        )
    return f"{key}: unknown key{_did_you_mean(key, list(kinds))}"


def _did_you_mean(word: str, words: Sequence[str]) -> str:
    """' (did you mean a or b?)', or '' when nothing is close. The last part of a dotted key counts most."""
    last = word.rsplit(".", 1)[-1]
    close = [other for other in words if other.rsplit(".", 1)[-1] == last and other != word][:2]
    close = close or difflib.get_close_matches(word, words, n=1, cutoff=0.7)
    if not close:  # a right-looking last part in the wrong section: gama=0.9
        by_last = {other.rsplit(".", 1)[-1]: other for other in words}
        close = [by_last[match] for match in difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.7)]
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
