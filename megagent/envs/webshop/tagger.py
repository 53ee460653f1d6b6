"""Who says which words of a title are nouns: spaCy's tagger where its model is installed, else a rule.

A tagger works when a catalogue is built, and never again: its nouns are kept with the products. Nothing here is
downloaded, and spaCy is imported by `SpacyTagger` alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Protocol

from megagent.envs.webshop.nouns import RuleTagger
from megagent.errors import CatalogError

MODEL = "en_core_web_sm"  # the one that the original uses
_NOUNS = ("NOUN", "PROPN")
_UNUSED_PIPES = ("parser", "ner", "lemmatizer", "senter")


class Tagger(Protocol):
    """Finds the nouns of titles."""

    name: str  # kept in the catalogue; says the version where there is one

    def nouns(self, titles: Sequence[str]) -> list[tuple[str, ...]]:
        """[titles] the nouns of each title, lower case, in order, repetitions kept."""


class SpacyTagger:
    """The tokens that spaCy's English tagger calls a noun or a name, as the original has them."""

    def __init__(self, package: str = MODEL) -> None:
        """Loads an installed model package. Raises CatalogError if it does not load."""
        try:
            spacy = importlib.import_module("spacy")
            self._model = spacy.load(package, exclude=list(_UNUSED_PIPES))
        except Exception as error:  # spaCy and what it stands on fail in many ways
            raise CatalogError(
                f"spaCy's model {package} is installed but does not load: {error}. Repair it, or uninstall it to have "
                "the nouns of titles found by rule."
            ) from error
        self.name = f"spaCy {spacy.__version__} {package} {self._model.meta['version']}"

    def nouns(self, titles: Sequence[str]) -> list[tuple[str, ...]]:
        """[titles] the nouns of each title, lower case, in order, repetitions kept."""
        return [
            tuple(token.text.lower() for token in document if token.pos_ in _NOUNS)
            for document in self._model.pipe(titles)
        ]


def installed_model() -> str | None:
    """The package that holds the original's spaCy model, if one and spaCy are installed; imports neither."""
    if find_spec("spacy") is None:
        return None
    packages = sorted(point.name for point in entry_points(group="spacy_models") if point.name.startswith(MODEL))
    return packages[0] if packages else None  # the model's own name comes first


def best_tagger() -> Tagger:
    """spaCy's tagger where its model is installed, else the rule."""
    package = installed_model()
    return SpacyTagger(package) if package else RuleTagger()
