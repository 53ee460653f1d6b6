"""Products, and how they are read from a folder in the original's schema.

    items_shuffle*.json   list of products
    items_ins_v2*.json    asin -> attributes, and for some the instruction that goals are made of
    title_nouns.json      optional: asin -> nouns of the title, as a tagger found them
Each may be plain or .gz. The files are data of others: everything is checked, and all faults of a file are reported
together, by product and field.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagent.envs.webshop.nouns import title_nouns
from megagent.envs.webshop.product import NO_PRICE, Product
from megagent.errors import CatalogError

_SHOWN_FAULTS = 20
_ASIN_LENGTH = 10
# Control characters but tab and line breaks, and halves of surrogate pairs, which cannot even be encoded.
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Records:
    """A catalogue in the original's schema, parsed from JSON and not yet checked."""

    items: Any
    attributes: Any
    nouns: Any = None
    items_source: str = "items"
    attributes_source: str = "attributes"
    nouns_source: str = "title nouns"


class _Faults:
    """Faults of one file, reported together."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[str] = []

    def add(self, where: str, what: str) -> None:
        self.found.append(f"{where}: {what}")

    def report(self) -> str:
        noun = "fault" if len(self.found) == 1 else "faults"
        shown = self.found[:_SHOWN_FAULTS]
        more = len(self.found) - len(shown)
        lines = [f"{self.source}: {len(self.found)} {noun}", *(f"  {fault}" for fault in shown)]
        return "\n".join([*lines, f"  ... and {more} more"] if more else lines)


def read_folder(folder: str | Path) -> Records:
    """Reads the files of a catalogue folder; their content is checked by `build_products`.

    Raises CatalogError if the folder or a file is missing, or a file is not whole JSON.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CatalogError(
            f"env.catalog={folder}: no such folder. Give the folder that holds items_shuffle*.json and "
            "items_ins_v2*.json, or use env.catalog=embedded."
        )
    problems: list[str] = []
    content: dict[str, Any] = {}
    paths: dict[str, Path | None] = {}
    for stem in ("items_shuffle", "items_ins_v2", "title_nouns"):
        found = sorted(path for path in folder.glob(f"{stem}*.json*") if path.name.endswith((".json", ".json.gz")))
        paths[stem] = found[0] if found else None
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            problems.append(f"{folder}: {stem}*.json is there {len(found)} times ({names}); keep one of them")
        elif found:
            try:
                content[stem] = _read_json(found[0])
            except CatalogError as error:
                problems.append(str(error))
        elif stem != "title_nouns":
            problems.append(f"{folder}: {stem}*.json (or .json.gz) is missing; copy it from the original's data")
    if problems:
        raise CatalogError("\n".join(problems))
    return Records(
        items=content["items_shuffle"],
        attributes=content["items_ins_v2"],
        nouns=content.get("title_nouns"),
        items_source=str(paths["items_shuffle"]),
        attributes_source=str(paths["items_ins_v2"]),
        nouns_source=str(paths["title_nouns"]),
    )


def _read_json(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        if path.name.endswith(".gz"):
            raw = gzip.decompress(raw)
        return json.loads(raw.decode("utf-8"))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CatalogError(f"{path}: the compressed file is damaged or cut short ({error}); copy it again") from None
    except UnicodeDecodeError as error:
        raise CatalogError(f"{path}: not UTF-8 text at byte {error.start}; copy the file again") from None
    except json.JSONDecodeError as error:
        raise CatalogError(
            f"{path}: not whole JSON, it breaks at line {error.lineno}, column {error.colno} ({error.msg}); "
            "copy the file again"
        ) from None
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read ({error.strerror})") from None


def build_products(records: Records) -> list[Product]:
    """Checks a catalogue and turns it into products, in file order.

    As the original, it leaves out products whose asin is "nan" or longer than 10 characters. Raises CatalogError with
    every fault of every file.
    """
    items = _Faults(records.items_source)
    entries = _Faults(records.attributes_source)
    nouns = _Faults(records.nouns_source)
    attributes, noun_table = records.attributes, records.nouns
    if not isinstance(attributes, dict):
        entries.add("file", f"holds {_kind(attributes)} where an object of asin -> entry is expected")
        attributes = None
    if noun_table is not None and not isinstance(noun_table, dict):
        nouns.add("file", f"holds {_kind(noun_table)} where an object of asin -> nouns is expected")
        noun_table = None
    products: list[Product] = []
    first_seen: dict[str, int] = {}
    if not isinstance(records.items, list):
        items.add("file", f"holds {_kind(records.items)} where a list of products is expected")
    elif not records.items:
        items.add("file", "holds no products")
    for position, item in enumerate(records.items if isinstance(records.items, list) else ()):
        where = f"product {position}"
        if not isinstance(item, dict):
            items.add(where, f"is {_kind(item)} where an object is expected")
            continue
        asin = item.get("asin")
        if not isinstance(asin, str) or not asin:
            items.add(where, f"asin is {_shown(asin)} where a text is expected")
            continue
        _text(asin, where, "asin", items)
        where = f"{where} ({asin})"
        if asin == "nan" or len(asin) > _ASIN_LENGTH:
            continue
        if asin in first_seen:
            items.add(where, f"asin is that of product {first_seen[asin]} too")
            continue
        first_seen[asin] = position
        entry = _entry(attributes, asin, entries)
        product = _product(item, asin, entry, _table_nouns(noun_table, asin, nouns), where, items)
        if product is not None:
            products.append(product)
    reports = [faults.report() for faults in (items, entries, nouns) if faults.found]
    if reports:
        raise CatalogError("\n".join(reports))
    return products


def _product(
    item: Mapping[str, Any],
    asin: str,
    entry: tuple[tuple[str, ...], str, tuple[str, ...]],
    nouns: tuple[str, ...] | None,
    where: str,
    faults: _Faults,
) -> Product | None:
    before = len(faults.found)
    texts: dict[str, str] = {}
    for field in ("name", "full_description", "product_category", "category", "query"):
        texts[field] = _text(item.get(field), where, field, faults)
    bullets = _bullets(item.get("small_description"), where, faults)
    prices, tag = _prices(item.get("pricing"), where, faults)
    options = _options(item.get("customization_options"), where, faults)
    if len(faults.found) > before:
        return None
    attributes, instruction, instruction_attributes = entry
    return Product(
        asin=asin,
        title=texts["name"],
        description=texts["full_description"],
        bullets=bullets,
        category=texts["category"],
        product_category=texts["product_category"],
        query=texts["query"].lower().strip(),
        price_tag=tag,
        prices=prices,
        options=options,
        attributes=attributes,
        nouns=title_nouns(texts["name"]) if nouns is None else nouns,
        instruction=instruction,
        instruction_attributes=instruction_attributes,
    )


def _entry(attributes: Any, asin: str, faults: _Faults) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Attributes, instruction and its attributes of one product; empty where there is a fault."""
    nothing: tuple[tuple[str, ...], str, tuple[str, ...]] = ((), "", ())
    if attributes is None:
        return nothing
    entry = attributes.get(asin)
    where = f"product {asin}"
    if not isinstance(entry, dict):
        faults.add(where, "has no entry" if entry is None else f"entry is {_kind(entry)} where an object is expected")
        return nothing
    own = _text_list(entry.get("attributes"), where, "attributes", faults)
    if "instruction" not in entry:
        return own, "", ()
    instruction = _text(entry["instruction"], where, "instruction", faults)
    asked = _text_list(entry.get("instruction_attributes"), where, "instruction_attributes", faults)
    return own, instruction, asked


def _table_nouns(table: Any, asin: str, faults: _Faults) -> tuple[str, ...] | None:
    if table is None or asin not in table:
        return None
    return _text_list(table[asin], f"product {asin}", "nouns", faults)


def _text(value: Any, where: str, field: str, faults: _Faults) -> str:
    if not isinstance(value, str):
        faults.add(where, f"{field} is {_shown(value)} where a text is expected")
        return ""
    if bad := _NO_TEXT.search(value):
        faults.add(where, f"{field} holds {bad.group()!a} at character {bad.start()}, which is no text; remove it")
    return value


def _text_list(value: Any, where: str, field: str, faults: _Faults) -> tuple[str, ...]:
    if not isinstance(value, list):
        faults.add(where, f"{field} is {_shown(value)} where a list of texts is expected")
        return ()
    return tuple(_text(element, where, f"{field}[{number}]", faults) for number, element in enumerate(value))


def _bullets(value: Any, where: str, faults: _Faults) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_text(value, where, "small_description", faults),)
    return _text_list(value, where, "small_description", faults)


def _prices(value: Any, where: str, faults: _Faults) -> tuple[tuple[float, ...], str]:
    """The prices in a text such as "$10.99" or "$10.99 to $12.00", and how the page shows them."""
    if value is None or value == "":
        return (NO_PRICE,), f"${NO_PRICE}"
    if not isinstance(value, str):
        faults.add(where, f"pricing is {_shown(value)} where a text such as $10.99 is expected")
        return (), ""
    numbers = ["".join(c for c in part if c in "0123456789.") for part in value.split("$")[1:]]
    try:
        prices = tuple(float(number) for number in numbers[:2])
    except ValueError:
        prices = ()
    if not prices:
        faults.add(where, f"pricing is {_shown(value)}, a price without a number; write $10.99, or leave it empty")
        return (), ""
    return prices, " to ".join(f"${price}" for price in prices)


def _options(value: Any, where: str, faults: _Faults) -> dict[str, tuple[str, ...]]:
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        faults.add(where, f"customization_options is {_shown(value)} where an object of name -> values is expected")
        return {}
    options: dict[str, tuple[str, ...]] = {}
    for name, choices in value.items():
        field = f"customization_options.{name}"
        if choices is None:
            continue
        if not isinstance(choices, list):
            faults.add(where, f"{field} is {_shown(choices)} where a list of values is expected")
            continue
        values = []
        for number, choice in enumerate(choices):
            if isinstance(choice, dict):
                text = _text(choice.get("value"), where, f"{field}[{number}].value", faults)
                values.append(text.strip().replace("/", " | ").lower())
            else:
                faults.add(where, f"{field}[{number}] is {_shown(choice)} where an object with a value is expected")
        options[_text(name, where, "customization_options", faults).lower()] = tuple(values)
    return options


def sampled_prices(products: Sequence[Product], uniform: Callable[[float, float], float]) -> dict[str, float]:
    """What each product costs, asin -> dollars; a range is one draw of `uniform(low, high)`, in product order."""
    return {p.asin: p.prices[0] if len(p.prices) == 1 else uniform(p.prices[0], p.prices[1]) for p in products}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    """A value as a message shows it, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."
