from __future__ import annotations

import json
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from megagent.envs import build_world
from megagent.envs.webshop import tagger
from megagent.envs.webshop.build import build_catalog
from megagent.envs.webshop.config import WebShopConfig
from megagent.envs.webshop.nouns import RuleTagger
from megagent.envs.webshop.tagger import SpacyTagger, best_tagger, installed_model
from megagent.errors import CatalogError

from .conftest import entry, item


class Token:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos_ = {"for": "ADP", "red": "ADJ"}.get(text.lower(), "PROPN" if text[0].isupper() else "NOUN")


class Model:
    """Tags by capitals, and knows two words that are no nouns."""

    meta = {"version": "1.2"}  # noqa: RUF012

    def pipe(self, titles):
        return ([Token(word) for word in title.split()] for title in titles)


def install(monkeypatch, *packages: str, model: object = Model()) -> None:
    """Makes it look as if spaCy and these model packages were installed."""
    spacy = types.ModuleType("spacy")
    spacy.__spec__ = ModuleSpec("spacy", None)
    spacy.__version__ = "9.9"
    loaded = []

    def load(package, exclude):
        loaded.append(package)
        if isinstance(model, Exception):
            raise model
        return model

    spacy.load = load
    monkeypatch.setitem(sys.modules, "spacy", spacy)
    points = EntryPoints(EntryPoint(name, name, "spacy_models") for name in packages)
    monkeypatch.setattr(tagger, "entry_points", lambda group: points.select(group=group))


def test_the_originals_model_comes_before_packages_that_hold_it(monkeypatch):
    install(monkeypatch, "en_core_web_sm_other", "de_core_news_sm", "en_core_web_sm")
    assert installed_model() == "en_core_web_sm"


def test_any_package_that_holds_the_originals_model_will_do(monkeypatch):
    install(monkeypatch, "en_core_web_lg", "en_core_web_sm_other")
    found = best_tagger()
    assert found.name == "spaCy 9.9 en_core_web_sm_other 1.2"
    assert found.nouns(["Red hat for Anna", ""]) == [("hat", "anna"), ()]


def test_without_the_model_the_rule_is_the_tagger(monkeypatch):
    install(monkeypatch, "de_core_news_sm")
    assert best_tagger().name == "rules"


def test_without_spacy_the_rule_is_the_tagger(monkeypatch):
    monkeypatch.setattr(tagger, "find_spec", lambda name: None)
    assert best_tagger().name == "rules"


def test_a_model_that_does_not_load_is_named_with_a_way_out(monkeypatch):
    install(monkeypatch, "en_core_web_sm", model=OSError("config.cfg is missing"))
    with pytest.raises(CatalogError, match=r"en_core_web_sm.*config.cfg is missing.*uninstall"):
        SpacyTagger("en_core_web_sm")


def test_environments_import_no_spacy():
    code = (
        "import sys, megagent.envs; sys.exit(bool({'spacy', 'thinc'} & {name.split('.')[0] for name in sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_world_asks_no_tagger(monkeypatch, tmp_path, kind):
    folder = tmp_path / "products"
    folder.mkdir()
    (folder / "items_shuffle.json").write_text(json.dumps([item(f"B{number}") for number in range(9)]))
    (folder / "items_ins_v2.json").write_text(json.dumps({f"B{number}": entry() for number in range(9)}))
    catalog = folder
    if kind == "file":
        catalog = build_catalog(folder, tmp_path / "products.shop", tagger=RuleTagger()).path
    install(monkeypatch, "en_core_web_sm", model=OSError("it is not to be loaded"))
    assert build_world(WebShopConfig(catalog=str(catalog))).catalog.noun_source == "rules"
