"""Model families by architecture. A new family is one file with a table, and one entry in FAMILIES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagent.errors import MegagentError
from megagent.parallel.models.family import Family
from megagent.parallel.models.qwen2 import QWEN2

FAMILIES: tuple[Family, ...] = (QWEN2,)


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a model by the `architectures` of its config.json; raises MegagentError for one that has none."""
    architectures = tuple(hf_config.get("architectures") or ())
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    named = ", ".join(architectures) or "no architecture"
    raise MegagentError(f"config.json names {named}, which has no model family; use a model of one of: {supported}")


__all__ = ["FAMILIES", "Family", "family_of"]
