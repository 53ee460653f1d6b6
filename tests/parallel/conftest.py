"""The rank processes and the tiny model that tests of megagent.parallel share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel.pool import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A job's own deadline names the rank that is late; on a busy machine it must be reached before pytest's."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight processes that run jobs as Megatron ranks; see RankPool."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random Qwen2 model: 4 layers, 4 heads, 2 key/value heads, tied, in float32."""
    from tests.parallel.jobs import write_tiny_model

    folder = tmp_path_factory.mktemp("tiny_model")
    write_tiny_model(folder)
    return folder
