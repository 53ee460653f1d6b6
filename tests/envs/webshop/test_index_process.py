from __future__ import annotations

import numpy as np
import pytest

from megagent.envs.webshop import embedded, index_process
from megagent.envs.webshop.index_process import IndexProcess
from megagent.envs.webshop.product_arrays import encode
from megagent.envs.webshop.search_build import IndexBuilder
from megagent.envs.webshop.source import products_of
from megagent.errors import InfrastructureError


def expected():
    builder = IndexBuilder(None)
    for product in products_of(embedded.records()):
        builder.add(product)
    return builder.finish()


def filled(scratch):
    index = IndexProcess(scratch)
    for product in products_of(embedded.records()):
        index.add_record(encode(product))
    return index


def check(found):
    right = expected()
    assert found.keys() == right.keys()
    for name, array in right.items():
        np.testing.assert_array_equal(found[name], array)


def test_few_products_are_indexed_without_a_process(tmp_path):
    index = filled(tmp_path)
    check(index.finish())
    index.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_process_builds_the_index_that_the_builder_builds(tmp_path, monkeypatch):
    monkeypatch.setattr(index_process, "_WORTH_A_PROCESS", 1)
    monkeypatch.setattr(index_process, "_PACKET", 1000)
    index = filled(tmp_path)
    try:
        check(index.finish())
    finally:
        index.close()


@pytest.mark.slow
def test_the_death_of_the_process_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(index_process, "_WORTH_A_PROCESS", 1)
    index = filled(tmp_path)
    try:
        assert index._process
        index._process.kill()
        with pytest.raises(InfrastructureError, match="search index has ended early"):
            index.finish()
    finally:
        index.close()
