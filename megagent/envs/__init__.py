"""Environments. Importing the package enters every one of them in the registry."""

from __future__ import annotations

from megagent.envs.base import WORLDS, WorldEntry, build_world
from megagent.envs.sokoban import SokobanConfig, SokobanWorld
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.world import build_webshop

WORLDS["webshop"] = WorldEntry(WebShopConfig, build_webshop)
WORLDS["sokoban"] = WorldEntry(SokobanConfig, SokobanWorld)

__all__ = ["WORLDS", "build_world"]
