"""Environments. Importing the package enters every one of them in the registry."""

from __future__ import annotations

from megagent.envs.base import WORLDS, build_world
from megagent.envs.webshop.world import build_webshop

WORLDS["webshop"] = build_webshop

__all__ = ["WORLDS", "build_world"]
