from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.envs.webshop import analysis, search_build
from megagent.envs.webshop import search as searching
from megagent.envs.webshop.analysis import terms
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.search import SearchIndex
from megagent.envs.webshop.search_build import IndexBuilder, coded_length, document
from megagent.envs.webshop.stemmer import stem
from megagent.errors import CatalogError


def product(asin: str, title: str, **fields) -> Product:
    rest = dict.fromkeys(("description", "category", "product_category", "query", "price_tag"), "")
    rest |= {"bullets": (), "prices": (1.0,), "options": {}, "attributes": (), "nouns": ()}
    return Product(**{"asin": asin, "title": title, **rest, **fields})


def products_of(*titles: str) -> list[Product]:
    """In the file's order, which is the reverse of their asins'."""
    return [product(f"B{99999 - number}", title) for number, title in enumerate(titles)]


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


SIGNS = st.sampled_from(["a", "b", "1", "2", "s", *"_.,:;'\"-/& %\n"])
FOREIGN = st.sampled_from(
    [
        "a",
        "1",
        "_",
        ".",
        "'",
        " ",
        "\u2019",
        "\u00e9",
        "\u0301",
        "\u200d",
        "\u2764",
        "\ufe0f",
        "\u8336",
        "\u3000",
        "\u0915",
        "\u093e",
    ]
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(SIGNS, max_size=40).map("".join))
def test_ascii_words_are_those_of_the_full_rules(text):
    assert analysis.ascii_segments(text) == analysis.unicode_segments(text)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(FOREIGN, max_size=30).map("".join))
def test_a_text_taken_apart_at_its_spaces_has_the_words_of_the_whole(text):
    segments = analysis.unicode_segments(text)
    whole = [term for segment in segments for term in analysis.segment_terms(segment)]
    assert terms(text) == whole


@settings(max_examples=100, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("piece", ["_", "a ", "(", "a.b", "1,", "\u00e9"])
def test_a_megabyte_of_anything_is_cut_into_words(piece):
    assert all(len(term) <= 255 for term in terms(piece * (1_000_000 // len(piece))))


def test_a_word_longer_than_lucene_takes_is_cut():
    assert [len(term) for term in terms("x" * 600)] == [255, 255, 90]


@pytest.mark.parametrize(
    ("length", "coded"),
    [(0, 0), (39, 39), (40, 40), (41, 40), (57, 56), (100, 96), (107, 104), (250, 248), (1000, 984)],
)
def test_document_lengths_are_coded_in_one_byte(length, coded):
    assert coded_length(length) == coded


def test_a_document_is_title_description_first_bullet_and_options():
    shirt = product(
        "B1",
        "Blue Cotton Shirt",
        description="A shirt.",
        bullets=("washable", "light"),
        options={"size": ("small", "w | l"), "fit": ("slim",)},
    )
    assert document(shirt) == "blue cotton shirt a shirt. washable size: small, w | l, and fit: slim"


def test_equal_scores_are_in_the_order_of_the_asin():
    index = SearchIndex.of(products_of("red hat", "blue hat", "green hat"))
    assert index.search("hat") == [2, 1, 0]


def test_only_products_with_a_term_of_the_query_are_found():
    index = SearchIndex.of(products_of("red hat", "blue shoe"))
    assert index.search("hat lamp") == [0]
    assert index.search("lamp") == []
    assert index.search("") == []


def test_no_more_than_the_asked_number_is_returned():
    index = SearchIndex.of(products_of(*["hat"] * 60))
    assert len(index.search("hat")) == 50
    assert len(index.search("hat", 12)) == 12
    assert index.search("hat", 0) == []


def test_terms_beyond_the_first_1024_of_a_query_are_ignored():
    index = SearchIndex.of(products_of("red hat", "blue shoe"))
    filler = " ".join(f"word{number}" for number in range(1023))
    assert index.search(f"{filler} hat shoe") == [0]


def test_an_empty_catalogue_has_an_index_that_finds_nothing(tmp_path):
    assert SearchIndex.of([]).search("hat") == []
    assert SearchIndex(IndexBuilder(tmp_path).finish()).search("hat") == []
    assert SearchIndex.of(products_of("", "of the")).search("hat of") == []


@pytest.mark.parametrize("name", ["positions", "best", "codes", "documents"])
def test_a_damaged_index_is_told(name):
    builder = IndexBuilder()
    for own in products_of("red shirt", "blue shirt"):
        builder.add(own)
    arrays = builder.finish()
    with pytest.raises(CatalogError, match="search index is damaged"):
        SearchIndex({**arrays, f"search/{name}": np.full_like(arrays[f"search/{name}"], 60_000)}).search("shirt")


def test_terms_of_one_hash_are_told_apart(monkeypatch):
    for module in (search_build, searching):
        monkeypatch.setattr(module, "term_hash", lambda text: len(text))
    index = SearchIndex.of(products_of("red hat", "ted rat", "hat shoe"))
    assert index.search("rat") == [1]
    assert index.search("hat") == [2, 0]
    assert index.search("bat shoes") == [2]


WORDS = st.lists(st.sampled_from(["hat", "shoe", "lamp", "red", "blue", "sofa"]), min_size=1, max_size=8).map(" ".join)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=st.lists(WORDS, min_size=1, max_size=12), query=WORDS)
def test_the_index_orders_as_the_formula_does_one_document_at_a_time(texts, query):
    products = products_of(*texts)
    words = [terms(document(own)) for own in products]
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

    found = SearchIndex.of(products).search(query)
    scores = [score(own) for own in words]
    assert sorted(found) == [number for number, value in enumerate(scores) if value > 0]
    ordered = [scores[number] for number in found]
    assert all(before > after - 1e-6 for before, after in pairwise(ordered))


# Few words of very different rarity, so that bars, ties and terms left over all occur.
RARITIES = st.sampled_from(["of", *["hat"] * 9, *["red"] * 6, *["blue"] * 4, "shoe", "shoe", "lamp", "sofa"])
TITLES = st.lists(RARITIES, max_size=9).map(" ".join)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=st.lists(TITLES, max_size=40),
    query=st.lists(st.sampled_from(["hat", "red", "blue", "shoe", "lamp", "sofa", "bed"]), max_size=6).map(" ".join),
    most=st.integers(1, 12),
)
def test_pruned_search_finds_what_exhaustive_search_finds(texts, query, most):
    index = SearchIndex.of(products_of(*texts))
    whole = index.search_all(query, most)
    assert index.search(query, most) == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "_SMALL", -1)
        assert index.search(query, most) == whole


def test_pruned_search_finds_what_exhaustive_search_finds_in_thousands(monkeypatch):
    monkeypatch.setattr(searching, "_SMALL", -1)
    rng = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(300)])
    ranks = np.minimum(rng.zipf(1.3, size=(12_000, 12)) - 1, 299)
    index = SearchIndex.of(products_of(*(" ".join(row) for row in words[ranks])))
    for _ in range(60):
        query = " ".join(words[np.minimum(rng.zipf(1.2, size=rng.integers(1, 9)) - 1, 299)])
        assert index.search(query) == index.search_all(query), query


def test_an_index_built_in_runs_and_buckets_is_the_same(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    titles = [" ".join(f"w{number}" for number in rng.integers(0, 40, size=6)) for _ in range(200)]
    whole = IndexBuilder()
    monkeypatch.setattr(search_build, "_CACHED_PIECES", 7)
    for own in products_of(*titles):
        whole.add(own)
    arrays = whole.finish()
    monkeypatch.setattr(search_build, "_RUN_TOKENS", 100)
    monkeypatch.setattr(search_build, "_BUCKET_POSTINGS", 64)
    parts = IndexBuilder(tmp_path)
    for own in products_of(*titles):
        parts.add(own)
    pieced = parts.finish()
    assert list(pieced) == list(arrays)
    for name, values in arrays.items():
        assert pieced[name].dtype == values.dtype, name
        assert np.array_equal(pieced[name], values), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["search-codes", "search-documents"]
