from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

from megagent.envs.webshop import source
from megagent.envs.webshop.nouns import RuleTagger
from megagent.envs.webshop.source import Reading, Records, open_folder, open_records, products_of
from megagent.errors import CatalogError

from .conftest import entry, item

ENTRIES = {"B1": entry(), "B2": entry(), "B3": entry()}


class Shouter:
    """A tagger that shows what it was given."""

    name = "shouter"

    def nouns(self, titles):
        return [(title.upper(),) for title in titles]


def write(folder, items, attributes, **others):
    content = {"items_shuffle_9": items, "items_ins_v2_9": attributes, **others}
    for name, value in content.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def read(folder, *, skip_bad=False, tagger=None):
    reading = Reading(open_folder(folder), tagger or RuleTagger(), skip_bad=skip_bad)
    return list(reading), reading


def faults_of(records):
    with pytest.raises(CatalogError) as caught:
        products_of(records)
    return str(caught.value)


def test_products_without_a_usable_asin_are_left_out_as_in_the_original():
    items = [item("nan"), item("B1"), item("B2345678901")]
    assert [p.asin for p in products_of(Records(items, ENTRIES))] == ["B1"]


@pytest.mark.parametrize("asin", ["b1", "B\u00df"])
def test_an_asin_that_its_page_could_not_lead_back_to_is_a_fault(asin):
    with pytest.raises(CatalogError, match=r"product 1 \(.*\): asin is .* where capitals and digits are expected"):
        products_of(Records([item("B1"), item(asin)], ENTRIES | {asin: entry()}))


def test_a_table_of_title_nouns_takes_precedence_over_the_tagger():
    records = Records([item("B1"), item("B2"), item("B3")], ENTRIES, nouns={"B1": ["shirt"], "B3": []})
    reading = Reading(open_records(records), Shouter())
    assert [p.nouns for p in reading] == [("shirt",), ("BLUE COTTON SHIRT",), ()]
    assert reading.noun_source == "title_nouns, then shouter"


def test_titles_are_tagged_in_order_whatever_the_batches(monkeypatch):
    monkeypatch.setattr(source, "_TITLES", 2)
    items = [item(f"B{number}", name=f"shirt {number}") for number in range(5)]
    records = Records(items, {element["asin"]: entry() for element in items})
    nouns = [p.nouns for p in Reading(open_records(records), Shouter())]
    assert nouns == [(f"SHIRT {number}",) for number in range(5)]


def test_a_second_product_with_the_same_asin_is_a_fault():
    assert "product 1 (B1): asin is that of product 0 too" in faults_of(Records([item("B1"), item("B1")], ENTRIES))


def test_options_that_combine_to_too_many_goals_are_a_fault():
    options = {f"o{number}": [{"value": f"v{value}"} for value in range(11)] for number in range(6)}
    records = Records([item("B1", customization_options=options)], ENTRIES)
    assert "product 0 (B1): its options combine to 1,771,561 goals" in faults_of(records)
    assert products_of(replace(records, attributes={"B1": {"attributes": []}}))  # nobody asks for it


def test_all_faults_of_all_files_are_reported_together():
    items = [item("B1", name=1, query=2), item("B2", pricing="free"), {"asin": 7}, 8, item("B3")]
    records = Records(items, {"B1": {"attributes": None}, "B2": entry()}, {"B2": "x"}, {"B3": 4})
    text = faults_of(records)
    for part in ("items: 5 faults", "attributes: 2 faults", "title nouns: 1 fault", "human instructions: 1 fault"):
        assert part in text
    for part in ("product 0 (B1): name", "product 0 (B1): query", "(B2): pricing", "product 2: asin is 7", "product 3"):
        assert part in text


@pytest.mark.parametrize("content", [{}, "products", None])
def test_a_product_file_that_is_no_list_is_refused(content):
    assert "items: 1 fault\n  file: holds" in faults_of(Records(content, {}))


def test_a_product_file_without_products_is_refused():
    assert faults_of(Records([], {})) == "items: 1 fault\n  file: holds no products"


def test_an_attributes_file_that_is_no_object_is_refused_once():
    text = faults_of(Records([item("B1"), item("B2")], []))
    assert text == "attributes: 1 fault\n  file: holds a list where an object of asin -> entry is expected"


def test_files_and_records_in_memory_give_the_same_products(tmp_path):
    items = [item("B1"), item("B2", pricing="$1 to $2")]
    human = {"B2": [{"instruction": "x", "instruction_attributes": ["a"], "instruction_options": []}]}
    write(tmp_path, items, ENTRIES, items_human_ins=human, title_nouns={"B1": ["shirt"]})
    expected = products_of(Records(items, ENTRIES, {"B1": ["shirt"]}, human))
    assert read(tmp_path)[0] == expected
    assert expected[1].human


def test_plain_and_compressed_files_give_the_same_products(tmp_path):
    write(tmp_path, [item("B1"), item("B2")], ENTRIES)
    plain, _ = read(tmp_path)
    for path in list(tmp_path.iterdir()):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert read(tmp_path)[0] == plain


def test_a_table_on_disk_gives_the_entries_of_one_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_IN_MEMORY", 100)
    monkeypatch.setattr(source, "_HASH", 7)  # so that most names share their hash with others
    items = [item(f"B{number}") for number in range(50)]
    attributes = {f"B{number}": {"attributes": [f"a{number}"]} for number in reversed(range(60))}
    write(tmp_path, items, attributes)
    products, _ = read(tmp_path)
    assert [p.attributes for p in products] == [(f"a{number}",) for number in range(50)]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json"]


def test_the_last_of_two_entries_counts_as_in_json(tmp_path):
    write(tmp_path, [item("B1")], {})
    (tmp_path / "items_ins_v2_9.json").write_text('{"B1": {"attributes": ["a"]}, "B1": {"attributes": ["b"]}}')
    assert read(tmp_path)[0][0].attributes == ("b",)


def test_bad_products_are_skipped_and_counted_when_asked(tmp_path):
    items = [item("B1"), item("B2", pricing="free"), 5, item("B1"), item("B4"), item("nan"), item("B3")]
    write(tmp_path, items, ENTRIES)
    products, reading = read(tmp_path, skip_bad=True)
    assert [p.asin for p in products] == ["B1", "B3"]
    assert reading.dropped == 4  # a price, no object, twice, no attributes entry
    assert "3 faults" in reading.report()
    assert "1 fault" in reading.report()


def test_that_no_product_is_left_is_said(tmp_path):
    write(tmp_path, [item("B1", pricing="free")], ENTRIES)
    with pytest.raises(CatalogError, match="no product is left\n.*: 1 fault"):
        read(tmp_path, skip_bad=True)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_cut_short_is_told_with_the_faults_before_the_cut(tmp_path, skip_bad):
    write(tmp_path, [], ENTRIES)
    whole = json.dumps([item("B1", pricing="free"), item("B2"), item("B3")])
    (tmp_path / "items_shuffle_9.json").write_text(whole[:-20])
    with pytest.raises(CatalogError) as caught:
        read(tmp_path, skip_bad=skip_bad)
    assert "1 fault\n  file: not whole JSON, it breaks at line 1, column" in str(caught.value)
    assert "product 0 (B1): pricing" in str(caught.value)


def test_faults_of_two_files_as_a_whole_are_told_together(tmp_path):
    (tmp_path / "items_shuffle_9.json").write_text("{}")
    (tmp_path / "items_ins_v2_9.json").write_text('{"B1": ')
    with pytest.raises(CatalogError) as caught:
        read(tmp_path)
    assert "holds an object where a list of products is expected" in str(caught.value)
    assert "items_ins_v2_9.json: 1 fault\n  file: not whole JSON" in str(caught.value)


def test_a_missing_folder_is_named_with_the_way_out(tmp_path):
    with pytest.raises(CatalogError, match=r"nowhere: no such folder.*embedded"):
        open_folder(tmp_path / "nowhere")


def test_all_missing_files_are_named(tmp_path):
    with pytest.raises(CatalogError) as caught:
        open_folder(tmp_path)
    assert "items_shuffle*.json (or .json.gz) is missing" in str(caught.value)
    assert "items_ins_v2*.json (or .json.gz) is missing" in str(caught.value)


def test_two_candidates_for_a_file_are_refused(tmp_path):
    write(tmp_path, [], {}, items_shuffle=[])
    with pytest.raises(CatalogError, match=r"items_shuffle\*.json is there 2 times"):
        open_folder(tmp_path)
