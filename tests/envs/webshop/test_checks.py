from __future__ import annotations

import pytest

from megagent.envs.webshop.checks import LONGEST_TEXT, Findings, Place
from megagent.envs.webshop.nouns import RuleTagger
from megagent.envs.webshop.product import HumanInstruction
from megagent.envs.webshop.source import Reading, Records, open_records, products_of
from megagent.errors import CatalogError

from .conftest import entry, item


def build(*items, **entries):
    attributes = {element["asin"]: entry() for element in items} | entries
    return products_of(Records(list(items), attributes))


def faults_of(*items, **entries):
    with pytest.raises(CatalogError) as caught:
        build(*items, **entries)
    return str(caught.value)


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


def test_a_bullet_text_counts_as_one_bullet():
    assert build(item("B1", small_description="one"))[0].bullets == ("one",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pricing": "about ten"}, 'pricing is "about ten", a price without a number'),
        ({"pricing": "$"}, 'pricing is "$", a price without a number'),
        ({"pricing": "$1.2.3"}, 'pricing is "$1.2.3", a price without a number'),
        ({"pricing": "$" + "9" * 400}, 'pricing is "$9999'),
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
        ({"name": "<b>Shirt</b>"}, 'name holds HTML ("<b>") where plain text is expected'),
        ({"query": "salt &amp; pepper"}, 'query holds HTML ("&amp;") where plain text is expected'),
        ({"customization_options": {"Size": [{"value": "5&#39;"}]}}, "customization_options.Size[0].value holds HTML"),
        ({"full_description": "x <script>alert(1)</script>"}, 'full_description holds HTML ("<script>")'),
        ({"small_description": ["a", "<iframe src=x>"]}, 'small_description[1] holds HTML ("<iframe src=x>")'),
        ({"full_description": "x" * LONGEST_TEXT}, "full_description is a text of 1,000,000 bytes"),
        ({"full_description": "\u00e9" * (LONGEST_TEXT // 2)}, "full_description is a text of 1,000,000 bytes"),
    ],
)
def test_a_fault_is_named_by_product_and_field(fields, message):
    assert f"product 1 (B2): {message}" in faults_of(item("B1"), item("B2", **fields))


@pytest.mark.parametrize(
    "text", ["a < b > c", "<3", "AT&T", "A&B;", "&nosuchname;", "x" * (LONGEST_TEXT - 1), "a\tb\nc"]
)
def test_text_that_only_looks_like_a_fault_is_kept_as_it_is(text):
    assert build(item("B1", name=text))[0].title == text


def test_formatting_in_a_description_is_kept_as_text_and_noted():
    text = 'soft <span class="a">and</span> warm&nbsp;'
    records = Records([item("B1", full_description=text, small_description=[text, "<br>"])], {"B1": entry()})
    reading = Reading(open_records(records), RuleTagger())
    (product,) = reading
    assert (product.description, product.bullets) == (text, (text, "<br>"))
    assert reading.notes.count == 3
    assert 'product 0 (B1): small_description[1] holds HTML ("<br>"), kept as text' in reading.notes.report("note")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "product B1: has no entry"),
        ([], "product B1: entry is a list where an object is expected"),
        ({"attributes": "soft"}, 'product B1: attributes is "soft" where a list of texts is expected'),
        ({"attributes": ["<b>"]}, 'product B1: attributes[0] holds HTML ("<b>")'),
        ({"attributes": [], "instruction": 5}, "product B1: instruction is 5 where a text is expected"),
        ({"attributes": [], "instruction": "x"}, "product B1: instruction_attributes is null where a list"),
    ],
)
def test_a_faulty_attributes_entry_is_named(value, message):
    assert message in faults_of(item("B1"), B1=value)


def test_what_people_wrote_is_kept_with_the_product():
    asked = {
        "instruction": "a shirt.",
        "instruction_attributes": ["soft"],
        "instruction_options": ["red"],
        "options": 1,
    }
    (product,) = products_of(Records([item("B1")], {"B1": entry()}, human={"B1": [asked]}))
    assert product.human == (HumanInstruction("a shirt.", ("soft",), ("red",)),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "product B1: entry is an object where a list of instructions is expected"),
        (["a shirt"], "product B1: [0] is a text where an object is expected"),
        (
            [{"instruction_attributes": [], "instruction_options": []}],
            "product B1: [0].instruction is null where a text",
        ),
        ([{"instruction": "x", "instruction_options": []}], "[0].instruction_attributes is null where a list of texts"),
    ],
)
def test_a_faulty_entry_of_what_people_wrote_is_named(value, message):
    with pytest.raises(CatalogError, match="human instructions: 1 fault") as caught:
        products_of(Records([item("B1")], {"B1": entry()}, human={"B1": value}))
    assert message in str(caught.value)


def test_of_very_many_faults_the_first_are_shown_and_the_rest_counted():
    text = faults_of(*(item(f"B{number}", name=None) for number in range(50)))
    assert "items: 50 faults" in text
    assert text.endswith("... and 30 more")


def test_a_long_value_is_cut_in_the_message():
    faults = Findings("x")
    Place("product 0", faults).texts("y" * 9999, "attributes")
    assert len(faults.report()) < 200
