from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.envs.webshop.product import HumanInstruction, Product
from megagent.envs.webshop.product_arrays import ProductArrays, ProductReader, decode, encode
from megagent.errors import CatalogError

TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs"), include_characters="\n\t"), max_size=6)
TEXTS = st.lists(TEXT, max_size=3).map(tuple)
PRODUCTS = st.builds(
    Product,
    asin=TEXT,
    title=TEXT,
    description=TEXT,
    bullets=TEXTS,
    category=TEXT,
    product_category=TEXT,
    query=TEXT,
    price_tag=TEXT,
    prices=st.lists(st.floats(0, 1e9), max_size=2).map(tuple),
    options=st.dictionaries(TEXT, TEXTS, max_size=3),
    attributes=TEXTS,
    nouns=TEXTS,
    instruction=TEXT,
    instruction_attributes=TEXTS,
    human=st.lists(st.builds(HumanInstruction, TEXT, TEXTS, TEXTS), max_size=2).map(tuple),
)
PLAIN = Product("B1", "t", "d", (), "c", "p", "q", "$1.0", (1.0,), {}, (), ())


def reader(products):
    builder = ProductArrays(None)
    for product in products:
        builder.add(product)
    return ProductReader(builder.finish()), builder.digest


@settings(max_examples=100, deadline=None, derandomize=True)
@given(product=PRODUCTS)
def test_a_record_gives_back_its_product(product):
    found = decode(encode(product))
    assert found == product
    assert list(found.options) == list(product.options)


@pytest.mark.parametrize("bad", ["\x1c", "\x1d", "\x1e", "\x1f"])
@pytest.mark.parametrize(
    "fields",
    [
        lambda text: {"title": text},
        lambda text: {"bullets": (text,)},
        lambda text: {"options": {text: ()}},
        lambda text: {"options": {"size": (text,)}},
        lambda text: {"human": (HumanInstruction("x", (), (text,)),)},
    ],
)
def test_a_text_that_would_break_its_record_is_refused(bad, fields):
    with pytest.raises(CatalogError, match="product B1: a text of it holds control characters"):
        encode(replace(PLAIN, **fields(f"a{bad}b")))


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(CatalogError, match="product B1: a text of it is not Unicode"):
        encode(replace(PLAIN, title="\ud800"))


def test_products_are_found_by_asin_and_by_position():
    asins = ["B3", "B1", "B2", "B", "\u00e9"]
    found, _ = reader([replace(PLAIN, asin=asin) for asin in asins])
    assert len(found) == 5
    for position, asin in enumerate(asins):
        assert found.product(position).asin == asin
        assert found.position(asin) == position


@pytest.mark.parametrize("asin", ["", "A", "B4", "Z", "B1234567890123", "B1\x00", "\ud800"])
def test_an_asin_that_is_not_there_is_not_found(asin):
    assert reader([replace(PLAIN, asin="B1"), replace(PLAIN, asin="B2")])[0].position(asin) is None


def test_no_products_are_no_trouble():
    found, _ = reader([])
    assert len(found) == 0
    assert found.position("B1") is None


def test_the_digest_follows_every_field_and_the_order():
    other = replace(PLAIN, asin="B2")
    digests = {
        reader(products)[1]
        for products in (
            [PLAIN, other],
            [other, PLAIN],
            [PLAIN],
            [replace(PLAIN, nouns=("t",)), other],
            [replace(PLAIN, bullets=("",)), other],
            [replace(PLAIN, prices=(2.0,)), other],
        )
    }
    assert len(digests) == 6
    assert reader([PLAIN, other])[1] in digests


def test_a_scratch_folder_changes_nothing_but_the_place(tmp_path):
    builders = [ProductArrays(None), ProductArrays(tmp_path)]
    for builder in builders:
        builder.add(PLAIN)
    one, two = (builder.finish() for builder in builders)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    assert list(tmp_path.iterdir())


def test_a_damaged_order_of_asins_is_told():
    builder = ProductArrays(None)
    builder.add(PLAIN)
    arrays = {**builder.finish(), "products/by_asin": np.array([7], np.uint32)}
    with pytest.raises(CatalogError, match="order of asins is damaged"):
        ProductReader(arrays).position("B1")


@pytest.mark.parametrize("name", ["records", "sums"])
def test_a_single_changed_bit_of_a_record_is_told(name):
    builder = ProductArrays(None)
    builder.add(PLAIN)
    arrays = {key: array.copy() for key, array in builder.finish().items()}
    raw = arrays[f"products/{name}"].view(np.uint8)
    for place in range(8 * len(raw)):
        raw[place // 8] ^= 1 << place % 8
        with pytest.raises(CatalogError, match="the catalogue's record of product 0 is damaged; build it again"):
            ProductReader(arrays).product(0)
        raw[place // 8] ^= 1 << place % 8
    assert ProductReader(arrays).product(0) == PLAIN
