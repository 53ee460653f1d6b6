"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The machine may be busy: no example has a deadline, and every run tries the same ones.
settings.register_profile("megagent", deadline=None, derandomize=True)
settings.load_profile("megagent")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes come last: what is wrong in a function is seen before what is wrong around it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
