"""Model families by architecture. A new family is one file with a table, and one entry in FAMILIES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagent.errors import ConfigError
from megagent.parallel.models.architecture import Architecture
from megagent.parallel.models.family import Family
from megagent.parallel.models.llama import LLAMA
from megagent.parallel.models.mistral import MISTRAL
from megagent.parallel.models.mixtral import MIXTRAL
from megagent.parallel.models.qwen2 import QWEN2
from megagent.parallel.models.qwen3 import QWEN3
from megagent.parallel.models.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL, MIXTRAL)


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a model by the `architectures` of its config.json; raises ConfigError for one that has none."""
    listed = hf_config.get("architectures") or ()
    named = tuple(map(str, listed)) if isinstance(listed, list | tuple) else (str(listed),)
    for family in FAMILIES:
        if named == (family.hf_class,):
            return family
    supported = ", ".join(family.hf_class for family in FAMILIES)
    given = f"architectures={', '.join(named)}" if named else "architectures is missing"
    raise ConfigError([f"{given}: there is no such model family; use one of: {supported}"], source="config.json")


def architecture_of(hf_config: Mapping[str, Any]) -> Architecture:
    """The model that a config.json describes. Raises ConfigError with everything in it that is missing, not known, or
    cannot be expressed."""
    return family_of(hf_config).architecture(hf_config)


def hf_config_of(architecture: Architecture) -> dict[str, Any]:
    """The config.json of an architecture, the inverse of `architecture_of`."""
    family = next(family for family in FAMILIES if family.name == architecture.family)
    return family.hf_config(architecture)


__all__ = ["FAMILIES", "Architecture", "Family", "architecture_of", "family_of", "hf_config_of"]
