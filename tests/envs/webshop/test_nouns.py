from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from megagent.envs.webshop.nouns import RuleTagger, title_nouns, tokens


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Men's T-Shirt (Large)", ["Men", "'s", "T", "-", "Shirt", "(", "Large", ")"]),
        ("2-Pack, 8oz/Bottle.", ["2", "-", "Pack", ",", "8oz", "/", "Bottle", "."]),
        ("8oz 10.5 5% 12x16 40ML", ["8", "oz", "10.5", "5", "%", "12x16", "40ML"]),
        ("Table,Chair Co. U.S. red,40", ["Table", ",", "Chair", "Co.", "U.S.", "red,40"]),
        ("CD-560 f/2.8 \u3010New\u3011 A | B", ["CD-560", "f/2.8", "\u3010", "New", "\u3011", "A", "|", "B"]),
        ("", []),
    ],
)
def test_titles_are_taken_apart_as_spacy_does_it(title, expected):
    assert tokens(title) == expected


def test_every_word_counts_but_function_words_and_numbers():
    assert title_nouns("The Blue Shirts for Men with 3 Pockets and 2nd Collar") == (
        "blue",
        "shirts",
        "men",
        "pockets",
        "collar",
    )


def test_amounts_count_and_sizes_do_not():
    assert title_nouns("Soap 20ml 4pcs 18x18 inch 5 x 7 iPhone X") == ("soap", "20ml", "4pcs", "inch", "iphone", "x")


def test_repeated_nouns_are_kept_in_order():
    assert title_nouns("Hair Oil, Hair Mask") == ("hair", "oil", "hair", "mask")


def test_a_title_of_a_megabyte_without_a_space_is_one_word():
    title = "(" * 1_000_000
    assert title_nouns(title) == ()
    assert title_nouns(f"a{title} Shirt") == (f"a{title}", "shirt")


def test_the_rule_is_a_tagger_with_a_name():
    assert RuleTagger().name == "rules"
    assert RuleTagger().nouns(["Red Hat", ""]) == [("red", "hat"), ()]


def test_the_rule_finds_most_of_the_originals_nouns(data):
    golden = data.parent / "golden" / "title_nouns.json.gz"
    if not golden.is_file():
        pytest.skip(f"{golden} is not there")
    items = json.loads(gzip.decompress((data / "items_shuffle_1000.json.gz").read_bytes()))
    titles = {item["asin"]: item["name"] for item in items}
    table = json.loads(gzip.decompress(golden.read_bytes()))
    both = by_rule = by_tagger = 0
    for asin, nouns in table.items():
        wanted, found = Counter(nouns), Counter(title_nouns(titles[asin]))
        both += (wanted & found).total()
        by_rule += found.total()
        by_tagger += wanted.total()
    assert both / by_rule > 0.93
    assert both / by_tagger > 0.98
