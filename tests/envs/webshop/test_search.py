from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.envs.webshop.analysis import terms
from megagent.envs.webshop.catalog import Records, build_products
from megagent.envs.webshop.search import SearchIndex, coded_length, document
from megagent.envs.webshop.stemmer import stem

from .conftest import entry, item


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("caresses", "caress"),
        ("ponies", "poni"),
        ("agreed", "agre"),
        ("plastered", "plaster"),
        ("motoring", "motor"),
        ("hopping", "hop"),
        ("falling", "fall"),
        ("filing", "file"),
        ("happy", "happi"),
        ("sky", "sky"),
        ("relational", "relat"),
        ("vietnamization", "vietnam"),
        ("hopefulness", "hope"),
        ("electrical", "electr"),
        ("adjustment", "adjust"),
        ("adoption", "adopt"),
        ("probate", "probat"),
        ("rate", "rate"),
        ("controll", "control"),
        ("roll", "roll"),
        # Departures from the paper.
        ("technology", "technolog"),
        ("assembly", "assembl"),
        ("is", "is"),
    ],
)
def test_stems_are_porters(word, expected):
    assert stem(word) == expected


@given(st.text(max_size=30))
def test_any_text_has_a_stem_and_terms(text):
    stem(text.lower())
    assert all(terms(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Women's shoes, size 10.5!", ["women", "shoe", "size", "10.5"]),
        ("don\u2019t e_mail a-b", ["don\u2019t", "e_mail", "b"]),
        ("\u8336 \u7eff\u8336", ["\u8336", "\u7eff", "\u8336"]),
        ("\u2665 \u2605 \u25cf \u2606 \u00ae", ["\u2665", "\u2605", "\u00ae"]),
        ("\u2764\ufe0f", ["\u2764\ufe0f"]),
        ("\u00bd inch 1\u20442", ["inch", "1\u20442"]),
        ("(\uff9f", []),
        ("of the", []),
    ],
)
def test_words_are_those_of_lucene(text, expected):
    assert terms(text) == expected


def test_a_word_longer_than_lucene_takes_is_cut():
    assert [len(term) for term in terms("x" * 600)] == [255, 255, 90]


@pytest.mark.parametrize(
    ("length", "coded"),
    [(0, 0), (39, 39), (40, 40), (41, 40), (57, 56), (100, 96), (107, 104), (250, 248), (1000, 984)],
)
def test_document_lengths_are_coded_in_one_byte(length, coded):
    assert coded_length(length) == coded


def products_of(*texts):
    items = [
        item(f"B{99 - number}", name=text, full_description="", small_description="")
        for number, text in enumerate(texts)
    ]
    items = [{**element, "customization_options": ""} for element in items]
    return build_products(Records(items, {element["asin"]: entry() for element in items}))


def test_a_document_is_title_description_first_bullet_and_options():
    (product,) = build_products(Records([item("B1")], {"B1": entry()}))
    assert document(product) == "blue cotton shirt a shirt. washable size: small, w | l"


def test_equal_scores_are_in_the_order_of_the_asin():
    index = SearchIndex(products_of("red hat", "blue hat", "green hat"))
    assert index.search("hat") == [2, 1, 0]


def test_only_products_with_a_term_of_the_query_are_found():
    index = SearchIndex(products_of("red hat", "blue shoe"))
    assert index.search("hat lamp") == [0]
    assert index.search("lamp") == []
    assert index.search("") == []


def test_no_more_than_the_asked_number_is_returned():
    index = SearchIndex(products_of(*["hat"] * 60))
    assert len(index.search("hat")) == 50
    assert len(index.search("hat", 12)) == 12


WORDS = st.lists(st.sampled_from(["hat", "shoe", "lamp", "red", "blue", "sofa"]), min_size=1, max_size=8).map(" ".join)


@settings(max_examples=60)
@given(texts=st.lists(WORDS, min_size=1, max_size=12), query=WORDS)
def test_the_index_orders_as_the_formula_does_one_document_at_a_time(texts, query):
    products = products_of(*texts)
    words = [terms(document(product)) for product in products]
    mean = sum(map(len, words)) / len(words)

    def score(own: list[str]) -> float:
        total = 0.0
        for term, repetitions in Counter(terms(query)).items():
            holders = sum(term in other for other in words)
            idf = math.log(1 + (len(words) - holders + 0.5) / (holders + 0.5))
            weight = repetitions * idf
            norm = 0.9 * ((1 - 0.4) + 0.4 * coded_length(len(own)) / mean)
            total += weight - weight / (1 + own.count(term) / norm)
        return total

    found = SearchIndex(products).search(query)
    scores = [score(own) for own in words]
    assert sorted(found) == [number for number, value in enumerate(scores) if value > 0]
    keys = [(-round(scores[number], 9), products[number].asin) for number in found]
    assert keys == sorted(keys)
