"""Where products come from: records in the original's schema, in files or in memory, read one at a time.

    items_shuffle*.json    list of products
    items_ins_v2*.json     asin -> attributes, and for some the instruction that goals are made of
    items_human_ins*.json  optional: asin -> what people wrote to ask for the product
    title_nouns*.json      optional: asin -> nouns of the title, as a tagger found them
Each may be plain or .gz. The products are streamed. The tables are put aside on disk, so that a catalogue larger than
memory can be read.
"""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megagent.envs.webshop.checks import Entry, Findings, Place, check_entry, check_human, check_item, kind, shown
from megagent.envs.webshop.deal import MOST_CHOICES
from megagent.envs.webshop.goals import asks, choices
from megagent.envs.webshop.json_stream import JsonFile
from megagent.envs.webshop.nouns import RuleTagger
from megagent.envs.webshop.product import HumanInstruction, Product
from megagent.envs.webshop.tagger import Tagger
from megagent.errors import CatalogError

_STEMS: dict[str, str] = {  # role -> how the name of its file begins
    "items": "items_shuffle",
    "attributes": "items_ins_v2",
    "human instructions": "items_human_ins",
    "title nouns": "title_nouns",
}
_NEEDED = ("items", "attributes")
_ASIN_LENGTH = 10
_IN_MEMORY = 32 << 20  # bytes of a table that are kept in memory; more goes to disk
_NOTES = 3  # shown of what is noted; there may be one on every twentieth product
_TITLES = 256  # tagged at once: taggers are far faster on many
_HASH = (1 << 64) - 1


class Table(Protocol):
    """An object of asin -> entry."""

    def get(self, asin: str) -> Any | None: ...


@dataclass(frozen=True)
class Records:
    """A catalogue in the original's schema, parsed from JSON and not yet checked."""

    items: Any
    attributes: Any
    nouns: Any = None
    human: Any = None
    name: str = ""  # of the whole, in messages


class SpilledTable:
    """The entries of a file of asin -> entry, put aside on disk as the file has them. The last of two counts.

    In memory it takes 16 bytes an entry.
    """

    def __init__(self, file: JsonFile, scratch: Path | None) -> None:
        # Without a name in the folder, so that nothing is left behind however the process ends.
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=str(scratch) if scratch else None)  # noqa: SIM115
        hashes, starts = array("Q"), array("Q", [0])
        for asin, text in file.entries():
            hashes.append(hash(asin) & _HASH)
            line = f"[{json.dumps(asin)},{text}]".encode()
            self._file.write(line)
            starts.append(starts[-1] + len(line))
        order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable") if hashes else np.zeros(0, np.int64)
        self._hashes = array("Q", np.frombuffer(hashes, np.uint64)[order].tobytes() if hashes else b"")
        self._order = order
        self._starts = starts

    def get(self, asin: str) -> Any | None:
        """The entry, decoded; None where there is none."""
        wanted = hash(asin) & _HASH
        at = bisect_left(self._hashes, wanted)
        found = None
        while at < len(self._hashes) and self._hashes[at] == wanted:
            number = int(self._order[at])
            self._file.seek(self._starts[number])
            name, entry = json.loads(self._file.read(self._starts[number + 1] - self._starts[number]))
            found = entry if name == asin else found
            at += 1
        return found

    def close(self) -> None:
        self._file.close()


@dataclass
class Source:
    """A catalogue's records, open for one reading."""

    name: str  # in messages
    items: Iterator[Any]
    attributes: Table | None  # None: it is unusable, which is in `broken`
    human: Table | None = None
    nouns: Table | None = None
    names: Mapping[str, str] = field(default_factory=lambda: {role: role for role in _STEMS})  # of the files
    broken: dict[str, Findings] = field(default_factory=dict)  # role -> what is wrong with a file as a whole
    read: Callable[[], int] = lambda: 0  # bytes of the items read so far
    size: int = 0  # bytes of the items; 0: not known
    closes: Sequence[Callable[[], None]] = ()

    def close(self) -> None:
        for close in self.closes:
            close()


def open_records(records: Records) -> Source:
    """The records of a catalogue in memory."""
    name = records.name or "records"
    names = {role: f"{records.name} {role}".strip() for role in _STEMS}
    broken: dict[str, Findings] = {}
    items: Iterator[Any] = iter(())
    if isinstance(records.items, list):
        items = iter(records.items)
    else:
        _wrong_kind(broken, names, "items", kind(records.items))
    tables: dict[str, Any] = {
        "attributes": records.attributes,
        "human instructions": records.human,
        "title nouns": records.nouns,
    }
    for role, table in tables.items():
        if not isinstance(table, dict) and (table is not None or role in _NEEDED):
            _wrong_kind(broken, names, role, kind(table))
            tables[role] = None
    return Source(
        name=name,
        items=items,
        attributes=tables["attributes"],
        human=tables["human instructions"],
        nouns=tables["title nouns"],
        names=names,
        broken=broken,
    )


def open_folder(folder: str | Path, scratch: Path | None = None) -> Source:
    """The files of a catalogue folder; large tables are put aside in `scratch`, or the system's temporary folder.

    Raises CatalogError if the folder or a file is missing, or is there twice. What is wrong inside a file is found
    while reading.
    """
    folder = Path(folder)
    paths = _find_files(folder)
    names = {role: str(path) for role, path in paths.items()}
    broken: dict[str, Findings] = {}
    tables = {role: _table(path, role, scratch, broken, names) for role, path in paths.items() if role != "items"}
    items = JsonFile(paths["items"])
    return Source(
        name=str(folder),
        items=_stream(items, broken, names),
        attributes=tables.get("attributes"),
        human=tables.get("human instructions"),
        nouns=tables.get("title nouns"),
        names=names,
        broken=broken,
        read=lambda: items.position,
        size=items.size,
        closes=[items.close, *(table.close for table in tables.values() if table)],
    )


def _table(
    path: Path, role: str, scratch: Path | None, broken: dict[str, Findings], names: Mapping[str, str]
) -> SpilledTable | None:
    """The entries of a file; None if it is broken as a whole, which is recorded with the other faults."""
    try:
        with JsonFile(path) as file:
            if (first := file.kind()) == "{":
                return SpilledTable(file, scratch)
    except CatalogError as error:
        _record(broken, names, role, str(error).removeprefix(f"{path}: "))
    else:
        _wrong_kind(broken, names, role, _kind_of(first))
    return None


def _stream(items: JsonFile, broken: dict[str, Findings], names: Mapping[str, str]) -> Iterator[Any]:
    """The elements of the items file; what breaks it off is recorded, so that it is reported with the other faults."""
    try:
        if (first := items.kind()) == "[":
            yield from items.elements()
        else:
            _wrong_kind(broken, names, "items", _kind_of(first))
    except CatalogError as error:
        _record(broken, names, "items", str(error).removeprefix(f"{items.path}: "))


def _find_files(folder: Path) -> dict[str, Path]:
    """Role -> path, of the files that are there."""
    if not os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        raise CatalogError(
            f"{folder}: no such folder. Give the folder that holds items_shuffle*.json and items_ins_v2*.json, or use "
            "the built-in products: embedded."
        )
    problems: list[str] = []
    paths: dict[str, Path] = {}
    for role, stem in _STEMS.items():
        found = sorted(path for path in folder.glob(f"{stem}*.json*") if path.name.endswith((".json", ".json.gz")))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            problems.append(f"{folder}: {stem}*.json is there {len(found)} times ({names}); keep one of them")
        elif found:
            paths[role] = found[0]
        elif role in _NEEDED:
            problems.append(f"{folder}: {stem}*.json (or .json.gz) is missing; copy it from the original's data")
    if problems:
        raise CatalogError("\n".join(problems))
    return paths


def _wrong_kind(broken: dict[str, Findings], names: Mapping[str, str], role: str, found: str) -> None:
    wanted = "a list of products" if role == "items" else "an object of asin -> entry"
    _record(broken, names, role, f"holds {found} where {wanted} is expected")


def _record(broken: dict[str, Findings], names: Mapping[str, str], role: str, what: str) -> None:
    """Notes what is wrong with a file as a whole."""
    broken[role] = Findings(names[role])
    broken[role].add("file", what)


def _kind_of(first: str) -> str:
    return {"{": "an object", "[": "a list", '"': "a text", "n": "null", "t": "a boolean", "f": "a boolean"}.get(
        first, "a number"
    )


class Reading:
    """The products of a source, checked, in file order, their titles tagged where no table has the nouns.

    As the original, it leaves out products whose asin is "nan" or longer than 10 characters. With `skip_bad` it leaves
    out products with a fault too, and counts them in `dropped`; without, the first fault ends the products, the rest is
    still checked, and then CatalogError tells every fault of every file. A file that is broken as a whole always does.
    """

    def __init__(self, source: Source, tagger: Tagger, *, skip_bad: bool = False) -> None:
        self.source = source
        self.dropped = 0  # products with a fault
        self.seen = 0  # records
        self.notes = Findings(source.names["items"], _NOTES)
        self._tagger = tagger
        self._skip_bad = skip_bad
        self._faults = {role: Findings(name) for role, name in source.names.items()}
        self._positions: dict[str, int] = {}  # asin -> where it was first

    @property
    def noun_source(self) -> str:
        """Where the nouns come from: the tagger, with a table's entries before it."""
        return f"title_nouns, then {self._tagger.name}" if self.source.nouns else self._tagger.name

    def report(self) -> str:
        """Every fault of every file, and none as an empty text."""
        found = []
        for role, faults in self._faults.items():
            if role in self.source.broken:
                found.append(self.source.broken[role])
            if faults.count:
                found.append(faults)
        return "\n".join(findings.report() for findings in found)

    def __iter__(self) -> Iterator[Product]:
        kept = 0
        checked = self._checked()
        while batch := list(islice(checked, _TITLES)):
            waiting = [product for product, tagged in batch if not tagged]
            nouns = iter(self._tagger.nouns([product.title for product in waiting]))
            for product, tagged in batch:
                kept += 1
                yield product if tagged else replace(product, nouns=next(nouns))
        if self.source.broken or (self.dropped and not self._skip_bad):
            raise CatalogError(self.report())
        if not self.seen:
            raise CatalogError(f"{self.source.names['items']}: 1 fault\n  file: holds no products")
        if not kept:
            raise CatalogError("\n".join([f"{self.source.name}: no product is left", self.report()]).rstrip())

    def _checked(self) -> Iterator[tuple[Product, bool]]:
        """The products that are in order, and whether their nouns are known."""
        for position, item in enumerate(self.source.items):
            self.seen = position + 1
            before = self._count()
            checked = self._check(position, item)
            if self._count() > before:
                self.dropped += 1
            elif checked and (self._skip_bad or not self.dropped) and not self.source.broken:
                yield checked

    def _count(self) -> int:
        return sum(faults.count for faults in self._faults.values())

    def _check(self, position: int, item: Any) -> tuple[Product, bool] | None:
        place = Place(f"product {position}", self._faults["items"], self.notes)
        if not isinstance(item, dict):
            place.fault(f"is {kind(item)} where an object is expected")
            return None
        asin = item.get("asin")
        if not isinstance(asin, str) or not asin:
            place.fault(f"asin is {shown(asin)} where a text is expected")
            return None
        place = Place(f"product {position} ({asin})", self._faults["items"], self.notes)
        place.text(asin, "asin")
        if asin == "nan" or len(asin) > _ASIN_LENGTH:
            return None
        if asin.lower().upper() != asin:  # pages offer it in small letters
            place.fault(f"asin is {shown(asin)} where capitals and digits are expected")
            return None
        if asin in self._positions:
            place.fault(f"asin is that of product {self._positions[asin]} too")
            return None
        self._positions[asin] = position
        entry, human, nouns = self._table_entries(asin)
        product = check_item(item, asin, entry, nouns or (), human, place)
        if asks(product) and (goals := choices(product.options)) > MOST_CHOICES:
            place.fault(
                f"its options combine to {goals:,} goals, and {MOST_CHOICES:,} are the most; remove some of them"
            )
        return product, nouns is not None

    def _table_entries(self, asin: str) -> tuple[Entry, tuple[HumanInstruction, ...], tuple[str, ...] | None]:
        source, where = self.source, f"product {asin}"
        entry = Entry()
        human: tuple[HumanInstruction, ...] = ()
        nouns: tuple[str, ...] | None = None
        if source.attributes is not None:
            entry = check_entry(source.attributes.get(asin), Place(where, self._faults["attributes"]))
        if source.human is not None and (value := source.human.get(asin)) is not None:
            human = check_human(value, Place(where, self._faults["human instructions"]))
        if source.nouns is not None and (value := source.nouns.get(asin)) is not None:
            nouns = Place(where, self._faults["title nouns"]).texts(value, "nouns")
        return entry, human, nouns


def products_of(records: Records) -> list[Product]:
    """The checked products of records in memory, titles tagged by rule. Raises CatalogError with all faults."""
    return list(Reading(open_records(records), RuleTagger()))
