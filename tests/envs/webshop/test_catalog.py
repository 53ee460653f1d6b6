from __future__ import annotations

import gzip
import json

import pytest

from megagent.envs import build_world
from megagent.envs.webshop.catalog import Records, build_products, read_folder, sampled_prices
from megagent.envs.webshop.config import WebShopConfig
from megagent.errors import CatalogError

from .conftest import entry, item


def build(*items, **entries):
    attributes = {element["asin"]: entry() for element in items} | entries
    return build_products(Records(list(items), attributes))


def faults_of(*items, **entries):
    with pytest.raises(CatalogError) as caught:
        build(*items, **entries)
    return str(caught.value)


def write(folder, items, attributes):
    (folder / "items_shuffle_9.json").write_text(json.dumps(items))
    (folder / "items_ins_v2_9.json").write_text(json.dumps(attributes))


def test_a_record_becomes_a_product():
    (product,) = build(item("B1"))
    assert product.title == "Blue Cotton Shirt"
    assert product.query == "shirts"
    assert product.options == {"size": ("small", "w | l")}
    assert product.bullets == ("washable", "light")
    assert product.nouns == ("blue", "cotton", "shirt")
    assert product.instruction_attributes == ("washable",)


@pytest.mark.parametrize(
    ("pricing", "prices", "tag"),
    [
        ("$9", (9.0,), "$9.0"),
        ("$1,877.80", (1877.8,), "$1877.8"),
        ("$10.99 to $12.5", (10.99, 12.5), "$10.99 to $12.5"),
        ("$3 $4 $5", (3.0, 4.0), "$3.0 to $4.0"),
        ("", (100.0,), "$100.0"),
        (None, (100.0,), "$100.0"),
    ],
)
def test_prices_are_read_as_the_original_reads_them(pricing, prices, tag):
    (product,) = build(item("B1", pricing=pricing))
    assert (product.prices, product.price_tag) == (prices, tag)


def test_a_price_range_is_one_draw_and_a_single_price_none():
    products = build(item("B1"), item("B2", pricing="$1 to $3"))
    assert sampled_prices(products, lambda low, high: low + high) == {"B1": 10.5, "B2": 4.0}


def test_products_without_a_usable_asin_are_left_out_as_in_the_original():
    assert [p.asin for p in build(item("nan"), item("B1"), item("B2345678901"))] == ["B1"]


def test_a_bullet_text_counts_as_one_bullet():
    assert build(item("B1", small_description="one"))[0].bullets == ("one",)


def test_a_table_of_title_nouns_takes_precedence():
    records = Records([item("B1"), item("B2")], {"B1": entry(), "B2": entry()}, {"B1": ["shirt"]})
    assert [p.nouns for p in build_products(records)] == [("shirt",), ("blue", "cotton", "shirt")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pricing": "about ten"}, 'pricing is "about ten", a price without a number'),
        ({"pricing": "$"}, 'pricing is "$", a price without a number'),
        ({"pricing": 10.5}, "pricing is 10.5 where a text such as $10.99 is expected"),
        ({"name": None}, "name is null where a text is expected"),
        ({"full_description": "a\x00b"}, "full_description holds '\\x00' at character 1, which is no text"),
        ({"query": "\ud800"}, "query holds '\\ud800' at character 0, which is no text"),
        ({"customization_options": {"Si\x7fze": []}}, "customization_options holds '\\x7f' at character 2"),
        ({"small_description": ["a", 3]}, "small_description[1] is 3 where a text is expected"),
        ({"small_description": {}}, "small_description is {} where a list of texts is expected"),
        ({"customization_options": ["red"]}, 'customization_options is ["red"] where an object'),
        ({"customization_options": {"Size": "small"}}, 'customization_options.Size is "small" where a list'),
        ({"customization_options": {"Size": ["small"]}}, 'customization_options.Size[0] is "small" where an object'),
        ({"customization_options": {"Size": [{}]}}, "customization_options.Size[0].value is null where a text"),
    ],
)
def test_a_fault_is_named_by_product_and_field(fields, message):
    assert f"product 1 (B2): {message}" in faults_of(item("B1"), item("B2", **fields))


def test_a_second_product_with_the_same_asin_is_a_fault():
    assert "product 1 (B1): asin is that of product 0 too" in faults_of(item("B1"), item("B1"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "product B1: has no entry"),
        ([], "product B1: entry is a list where an object is expected"),
        ({"attributes": "soft"}, 'product B1: attributes is "soft" where a list of texts is expected'),
        ({"attributes": [], "instruction": 5}, "product B1: instruction is 5 where a text is expected"),
        ({"attributes": [], "instruction": "x"}, "product B1: instruction_attributes is null where a list"),
    ],
)
def test_a_faulty_attributes_entry_is_named(value, message):
    assert message in faults_of(item("B1"), B1=value)


def test_all_faults_of_all_files_are_reported_together():
    records = Records(
        [item("B1", name=1, query=2), item("B2", pricing="free"), {"asin": 7}, 8],
        {"B1": {"attributes": None}, "B2": entry()},
    )
    with pytest.raises(CatalogError) as caught:
        build_products(records)
    text = str(caught.value)
    assert "items: 5 faults" in text
    assert "attributes: 1 fault" in text
    for part in ("product 0 (B1): name", "product 0 (B1): query", "(B2): pricing", "product 2: asin is 7", "product 3"):
        assert part in text


def test_of_very_many_faults_the_first_are_shown_and_the_rest_counted():
    text = faults_of(*(item(f"B{number}", name=None) for number in range(50)))
    assert "items: 50 faults" in text
    assert text.endswith("... and 30 more")


@pytest.mark.parametrize("content", [{}, "products", None, []])
def test_a_product_file_that_is_no_list_of_products_is_refused(content):
    with pytest.raises(CatalogError, match=r"items: 1 fault\n  file: holds"):
        build_products(Records(content, {}))


def test_an_attributes_file_that_is_no_object_is_refused_once():
    with pytest.raises(CatalogError, match=r"^attributes: 1 fault\n  file: holds a list where an object") as caught:
        build_products(Records([item("B1"), item("B2")], []))
    assert "B1" not in str(caught.value)


def test_a_folder_gives_a_world_with_plain_and_compressed_files_alike(tmp_path):
    items = [item(f"B{number}") for number in range(40)]
    attributes = {element["asin"]: entry() for element in items}
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    packed.mkdir()
    write(plain, items, attributes)
    for name in ("items_shuffle_9.json", "items_ins_v2_9.json"):
        (packed / f"{name}.gz").write_bytes(gzip.compress((plain / name).read_bytes()))
    digests = {build_world(WebShopConfig(catalog=str(folder))).digest for folder in (plain, packed)}
    assert len(digests) == 1


def test_a_missing_folder_is_named_with_the_way_out(tmp_path):
    with pytest.raises(CatalogError, match=r"env.catalog=.*nowhere: no such folder.*embedded"):
        build_world(WebShopConfig(catalog=str(tmp_path / "nowhere")))


def test_all_missing_files_are_named(tmp_path):
    with pytest.raises(CatalogError) as caught:
        read_folder(tmp_path)
    assert "items_shuffle*.json (or .json.gz) is missing" in str(caught.value)
    assert "items_ins_v2*.json (or .json.gz) is missing" in str(caught.value)


def test_two_candidates_for_a_file_are_refused(tmp_path):
    write(tmp_path, [], {})
    (tmp_path / "items_shuffle.json").write_text("[]")
    with pytest.raises(CatalogError, match=r"items_shuffle\*.json is there 2 times"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items_shuffle_9.json", b'[{"asin": "B1", ', "not whole JSON, it breaks at line 1, column"),
        ("items_shuffle_9.json", b"[\xff]", "not UTF-8 text at byte 1"),
        ("items_shuffle_9.json", b"", "not whole JSON"),
        ("items_shuffle_9.json.gz", gzip.compress(b"[]" * 99)[:-9], "the compressed file is damaged or cut short"),
        ("items_shuffle_9.json.gz", b"[]", "the compressed file is damaged or cut short"),
    ],
)
def test_a_damaged_file_is_named_with_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "items_ins_v2_9.json").write_text("{}")
    with pytest.raises(CatalogError, match=message):
        read_folder(tmp_path)


def test_an_empty_panel_is_refused_when_it_is_asked_for(tmp_path):
    write(tmp_path, [item("B1")], {"B1": entry()})
    world = build_world(WebShopConfig(catalog=str(tmp_path)))
    with pytest.raises(CatalogError, match=r"no goal falls in the \w+ panel.*use a larger catalogue"):
        [world.tasks(split) for split in ("warmup", "train", "validation", "test")]
