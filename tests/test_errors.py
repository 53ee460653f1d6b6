"""Errors cross process borders as they are."""

from __future__ import annotations

import pickle

import pytest

from megagent.errors import BatchError, CatalogError, ConfigError, InfrastructureError, MegagentError


@pytest.mark.parametrize(
    "error",
    [
        MegagentError("a sentence"),
        BatchError("a row"),
        CatalogError("a product"),
        InfrastructureError("a process"),
        ConfigError(["one fault", "another fault"], source="rollout engine"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_words_when_pickled(error: MegagentError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


def test_config_faults_are_lines_under_a_count() -> None:
    assert str(ConfigError(["a", "b"])) == "configs: 2 problems\n  a\n  b"
