"""What a product's record in the original's schema must be, field by field, and what it means.

The data are of others: every field is checked, and a fault names product and field. Text is taken as it is, so that
search, pages and reward see what the original sees; what would not be text there is a fault:

    control characters (but tab and line breaks), and halves of surrogate pairs
    a megabyte or more in one field
    HTML tags and entities in a name, a kind, an option, an attribute or an instruction
    scripts, styles and frames in a description or a bullet

Other HTML in descriptions and bullets is part of the original's own data and searched there as text. It is kept, and
noted.
"""

from __future__ import annotations

import html.entities
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megagent.envs.webshop.product import NO_PRICE, HumanInstruction, Product

LONGEST_TEXT = 1_000_000  # bytes of UTF-8 in one field; a longer one is no description but an accident
_SHOWN = 20
# Control characters but tab and line breaks, and halves of surrogate pairs, which cannot even be encoded.
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_TAG = re.compile(
    r"</?(?:a|abbr|b|big|blockquote|br|center|code|dd|div|dl|dt|em|font|form|h[1-6]|hr|i|img|input|li|link|meta|ol|p|pre"
    r"|s|small|span|strong|sub|sup|table|tbody|td|th|thead|tr|tt|u|ul|video)\b[^<>]*>|<!--",
    re.IGNORECASE,
)
_CODE = re.compile(r"</?(?:script|style|iframe|object|embed|html|head|body)\b[^<>]*>", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")


class Findings:
    """What is wrong with one file, or worth a note: all of it counted, the first lines kept."""

    def __init__(self, source: str, shown: int = _SHOWN) -> None:
        self.source = source
        self.count = 0
        self._shown = shown
        self._lines: list[str] = []

    def add(self, where: str, what: str) -> None:
        self.count += 1
        if len(self._lines) < self._shown:
            self._lines.append(f"{where}: {what}")

    def report(self, noun: str = "fault") -> str:
        """The file, the number of findings, and the first of them line by line."""
        lines = [f"{self.source}: {self.count} {noun}{'' if self.count == 1 else 's'}"]
        lines += [f"  {line}" for line in self._lines]
        more = self.count - len(self._lines)
        return "\n".join([*lines, f"  ... and {more} more"] if more else lines)


@dataclass(frozen=True)
class Place:
    """One product in one file, to which faults and notes are ascribed."""

    where: str
    faults: Findings
    notes: Findings | None = None

    def fault(self, what: str) -> None:
        self.faults.add(self.where, what)

    def text(self, value: Any, field: str, *, prose: bool = False) -> str:
        """A text field. `prose` says that formatting may be in it, as in the original's descriptions."""
        if not isinstance(value, str):
            self.fault(f"{field} is {shown(value)} where a text is expected")
            return ""
        # Printable text is the rule, and is told apart without a regular expression.
        if not value.isprintable() and (bad := _NO_TEXT.search(value)):
            self.fault(f"{field} holds {bad.group()!a} at character {bad.start()}, which is no text; remove it")
        elif len(value) > LONGEST_TEXT // 4 and (size := len(value.encode())) >= LONGEST_TEXT:
            self.fault(f"{field} is a text of {size:,} bytes, and a field has less than {LONGEST_TEXT:,}; shorten it")
        elif ("<" in value or "&" in value) and (found := _html(value)):
            markup, code = found
            if code or not prose:
                self.fault(f"{field} holds HTML ({shown(markup)}) where plain text is expected; replace it")
            elif self.notes is not None:
                self.notes.add(self.where, f"{field} holds HTML ({shown(markup)}), kept as text")
        return value

    def texts(self, value: Any, field: str, *, prose: bool = False) -> tuple[str, ...]:
        """A list of texts."""
        if not isinstance(value, list):
            self.fault(f"{field} is {shown(value)} where a list of texts is expected")
            return ()
        return tuple(self.text(text, f"{field}[{number}]", prose=prose) for number, text in enumerate(value))


@dataclass(frozen=True)
class Entry:
    """What the attributes file says of a product."""

    attributes: tuple[str, ...] = ()
    instruction: str = ""
    instruction_attributes: tuple[str, ...] = ()


def check_item(
    item: Mapping[str, Any],
    asin: str,
    entry: Entry,
    nouns: tuple[str, ...],
    human: tuple[HumanInstruction, ...],
    place: Place,
) -> Product:
    """The product of a record of items_shuffle*.json; worth nothing if `place` was given a fault."""
    title = place.text(item.get("name"), "name")
    small = item.get("small_description")
    prices = check_prices(item.get("pricing"), place)
    return Product(
        asin=asin,
        title=title,
        description=place.text(item.get("full_description"), "full_description", prose=True),
        bullets=(
            (place.text(small, "small_description", prose=True),)
            if isinstance(small, str)
            else place.texts(small, "small_description", prose=True)
        ),
        category=place.text(item.get("category"), "category"),
        product_category=place.text(item.get("product_category"), "product_category"),
        query=place.text(item.get("query"), "query").lower().strip(),
        price_tag=" to ".join(f"${price}" for price in prices),
        prices=prices,
        options=_options(item.get("customization_options"), place),
        attributes=entry.attributes,
        nouns=nouns,
        instruction=entry.instruction,
        instruction_attributes=entry.instruction_attributes,
        human=human,
    )


def check_entry(value: Any, place: Place) -> Entry:
    """A product's entry of items_ins_v2*.json; None where the file has none."""
    if not isinstance(value, dict):
        place.fault("has no entry" if value is None else f"entry is {kind(value)} where an object is expected")
        return Entry()
    attributes = place.texts(value.get("attributes"), "attributes")
    if "instruction" not in value:
        return Entry(attributes)
    instruction = place.text(value["instruction"], "instruction")
    return Entry(attributes, instruction, place.texts(value.get("instruction_attributes"), "instruction_attributes"))


def check_human(value: Any, place: Place) -> tuple[HumanInstruction, ...]:
    """A product's entry of items_human_ins.json."""
    if not isinstance(value, list):
        place.fault(f"entry is {kind(value)} where a list of instructions is expected")
        return ()
    found = []
    for number, element in enumerate(value):
        if not isinstance(element, dict):
            place.fault(f"[{number}] is {kind(element)} where an object is expected")
            continue
        found.append(
            HumanInstruction(
                place.text(element.get("instruction"), f"[{number}].instruction"),
                place.texts(element.get("instruction_attributes"), f"[{number}].instruction_attributes"),
                place.texts(element.get("instruction_options"), f"[{number}].instruction_options"),
            )
        )
    return tuple(found)


def check_prices(value: Any, place: Place) -> tuple[float, ...]:
    """The prices in a text such as "$10.99" or "$10.99 to $12.00", dollars: the first two. None given: NO_PRICE."""
    if value is None or value == "":
        return (NO_PRICE,)
    if not isinstance(value, str):
        place.fault(f"pricing is {shown(value)} where a text such as $10.99 is expected")
        return ()
    numbers = ["".join(c for c in part if c in "0123456789.") for part in value.split("$")[1:]]
    try:
        prices = tuple(float(number) for number in numbers[:2])
    except ValueError:
        prices = ()
    if not prices or float("inf") in prices:
        place.fault(f"pricing is {shown(value)}, a price without a number; write $10.99, or leave it empty")
        return ()
    return prices


def _options(value: Any, place: Place) -> dict[str, tuple[str, ...]]:
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        place.fault(f"customization_options is {shown(value)} where an object of name -> values is expected")
        return {}
    options: dict[str, tuple[str, ...]] = {}
    for name, choices in value.items():
        field = f"customization_options.{name}"
        if choices is None:
            continue
        if not isinstance(choices, list):
            place.fault(f"{field} is {shown(choices)} where a list of values is expected")
            continue
        values = []
        for number, choice in enumerate(choices):
            if isinstance(choice, dict):
                text = place.text(choice.get("value"), f"{field}[{number}].value")
                values.append(text.strip().replace("/", " | ").lower())
            else:
                place.fault(f"{field}[{number}] is {shown(choice)} where an object with a value is expected")
        options[place.text(name, "customization_options").lower()] = tuple(values)
    return options


def _html(text: str) -> tuple[str, bool] | None:
    """The first HTML in a text, and whether it is more than formatting."""
    if code := _CODE.search(text):
        return code.group(), True
    if tag := _TAG.search(text):
        return tag.group(), False
    for entity in _ENTITY.finditer(text):
        if entity.group()[1] == "#" or entity.group()[1:] in html.entities.html5:
            return entity.group(), False
    return None


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value as a message shows it, cut to a readable length."""
    text = json.dumps(value[:61] if isinstance(value, str) else value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."
