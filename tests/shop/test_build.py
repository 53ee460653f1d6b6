from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from megagent.envs.webshop.catalog import Catalog
from megagent.errors import CatalogError
from megagent.shop import build

ITEM = {
    "asin": "B1",
    "name": "Blue Cotton Shirt",
    "full_description": "A <b>shirt</b>.",
    "small_description": ["washable"],
    "pricing": "$10.5",
    "product_category": "Clothing \u203a Shirts",
    "category": "fashion",
    "query": "shirts",
}


@pytest.fixture
def folder(tmp_path):
    """A product with a note, and one with a fault."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "items_shuffle.json").write_text(json.dumps([ITEM, {**ITEM, "asin": "B2", "pricing": "free"}]))
    (source / "items_ins_v2.json").write_text(json.dumps({asin: {"attributes": ["soft"]} for asin in ("B1", "B2")}))
    return source


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def console(request):
    return Console(file=io.StringIO(), force_terminal=request.param, width=100, highlight=False)


def test_the_embedded_catalogue_is_built_and_described(tmp_path, console):
    built = build.run("embedded", tmp_path / "x.shop", console=console)
    assert len(Catalog.open(tmp_path / "x.shop")) == built.products == 60
    text = console.file.getvalue()
    assert "x.shop: 60 products, " in text
    assert f"digest of the products: {built.digest[:16]}" in text


def test_skipped_products_are_named_and_counted(tmp_path, folder, console):
    build.run(str(folder), tmp_path / "x.shop", skip_bad=True, console=console)
    text = console.file.getvalue()
    assert 'product 1 (B2): pricing is "free"' in text
    assert "1 product with faults was left out" in text
    assert 'product 0 (B1): full_description holds HTML ("<b>"), kept as text' in text
    assert "x.shop: 1 product, " in text


def test_faults_end_the_command_with_all_of_them(tmp_path, folder, console):
    with pytest.raises(CatalogError, match=r'product 1 \(B2\): pricing is "free"'):
        build.run(str(folder), tmp_path / "x.shop", console=console)
    assert not (tmp_path / "x.shop").exists()


def test_a_catalogue_that_is_there_needs_overwrite(tmp_path, console):
    build.run("embedded", tmp_path / "x.shop", console=console)
    with pytest.raises(CatalogError, match="--overwrite"):
        build.run("embedded", tmp_path / "x.shop", console=console)
    build.run("embedded", tmp_path / "x.shop", overwrite=True, console=console)


def test_progress_is_drawn_on_a_terminal_and_told_by_lines_elsewhere(monkeypatch, tmp_path, console):
    monkeypatch.setattr(build, "_LINE_EVERY", 0.0)
    build.run("embedded", tmp_path / "x.shop", console=console)
    text = console.file.getvalue()
    assert "products, " in text
    assert ("\x1b[" in text) == console.is_terminal
    assert ("reading products: " in text) != console.is_terminal
