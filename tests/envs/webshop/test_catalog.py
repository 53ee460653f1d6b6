from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from megagent.envs.webshop import catalog as catalog_module
from megagent.envs.webshop import embedded
from megagent.envs.webshop.arrays import read_arrays, write_arrays
from megagent.envs.webshop.build import build_catalog
from megagent.envs.webshop.catalog import Catalog
from megagent.envs.webshop.nouns import RuleTagger
from megagent.envs.webshop.source import products_of
from megagent.errors import CatalogError

from .conftest import entry, item


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The file of the embedded catalogue."""
    path = tmp_path_factory.mktemp("built") / "embedded.shop"
    build_catalog("embedded", path)
    return path


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_the_embedded_catalogue_is_the_same_in_memory_and_in_a_file(built):
    memory, mapped = Catalog.load("embedded"), Catalog.load(built)
    assert list(memory) == list(mapped) == products_of(embedded.records())
    assert same(memory.arrays, mapped.arrays)
    assert memory.digest == mapped.digest
    assert memory.noun_source == mapped.noun_source


def test_a_folder_is_the_same_in_memory_and_in_a_file(data, tmp_path):
    build_catalog(data, tmp_path / "x.shop", tagger=RuleTagger())
    memory, mapped = Catalog.load(data), Catalog.open(tmp_path / "x.shop")
    assert len(memory) == 1000
    assert same(memory.arrays, mapped.arrays)
    assert memory.digest == mapped.digest


def test_products_make_the_same_catalogue_as_their_records(built):
    assert same(Catalog.of(products_of(embedded.records())).arrays, Catalog.open(built).arrays)


def test_it_is_a_sequence_of_its_products(built):
    products, found = products_of(embedded.records()), Catalog.open(built)
    assert len(found) == len(products)
    assert found[0] == products[0]
    assert found[-1] == products[-1]
    assert found[10:50:7] == products[10:50:7]
    assert products[5] in found
    for position in (60, -61):
        with pytest.raises(IndexError, match=f"element {position} of 60"):
            found[position]


def test_a_product_is_decoded_once_while_it_is_in_use_and_a_walk_does_not_push_it_out(built, monkeypatch):
    monkeypatch.setattr(catalog_module, "_DECODED", 3)
    found = Catalog.open(built)
    first = found[0]
    assert len(list(found)) == 60
    assert found[0] is first
    found[1:10]
    assert found[0] is not first


def test_every_product_is_found_by_its_asin(built):
    found = Catalog.open(built)
    assert [found.position(product.asin) for product in found] == list(range(60))
    assert found.position("B0") is None


def test_a_mapped_catalogue_travels_as_its_path(built):
    found = Catalog.open(built)
    sent = pickle.dumps(found)
    assert len(sent) < 500
    assert pickle.loads(sent)[7] == found[7]


def test_a_catalogue_in_memory_travels_whole():
    found = Catalog.of(products_of(embedded.records())[:5])
    arrived = pickle.loads(pickle.dumps(found))
    assert list(arrived) == list(found)
    assert (arrived.digest, arrived.source) == (found.digest, found.source)


def test_titles_without_nouns_are_tagged_when_a_tagger_is_given():
    untagged = [replace(product, nouns=()) for product in products_of(embedded.records())[:2]]
    found = Catalog.of(untagged, RuleTagger())
    assert found[0].nouns == RuleTagger().nouns([untagged[0].title])[0]
    assert found.noun_source == RuleTagger().name
    assert Catalog.of(untagged)[0].nouns == ()


def test_another_catalogue_has_another_digest(built):
    digests = {Catalog.of(products_of(embedded.records())[:count]).digest for count in (1, 2, 60)} | {
        Catalog.open(built).digest
    }
    assert len(digests) == 3


def test_a_missing_catalogue_is_named_with_the_ways_out(tmp_path):
    with pytest.raises(CatalogError, match=r"nowhere: no such folder.*embedded"):
        Catalog.load(tmp_path / "nowhere")


def test_a_file_that_is_no_catalogue_is_refused(tmp_path):
    (tmp_path / "items_shuffle.json").write_text("[]")
    with pytest.raises(CatalogError, match="items_shuffle.json: not a built catalogue"):
        Catalog.load(tmp_path / "items_shuffle.json")


def test_a_file_of_other_arrays_is_refused(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        write_arrays(file, {"search/text": np.zeros(3)}, {"digest": "", "noun_source": ""})
    with pytest.raises(CatalogError, match="x: the catalogue has no 'products/"):
        Catalog.open(tmp_path / "x")


def test_faults_of_a_folder_are_told_when_it_is_loaded(tmp_path):
    (tmp_path / "items_shuffle.json").write_text(json.dumps([item("B1", pricing="free")]))
    (tmp_path / "items_ins_v2.json").write_text(json.dumps({"B1": entry()}))
    with pytest.raises(CatalogError, match=r"product 0 \(B1\): pricing is \"free\""):
        Catalog.load(tmp_path)


def test_the_arrays_are_those_of_the_three_builders(built):
    arrays, meta = read_arrays(built)
    assert {name.split("/")[0] for name in arrays} == {"products", "search", "goals"}
    assert meta["products"] == 60
    assert len(arrays["goals/panel"]) == 60
