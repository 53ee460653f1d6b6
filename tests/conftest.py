"""What all tests share."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes come last: what is wrong in a function is seen before what is wrong around it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
