"""Builds a catalogue: products through three builders into arrays, in memory or in a file.

What is built beside a file lies in a hidden folder next to it, which holds a lock: a build that was killed leaves the
folder without one, and the next build removes it. The file itself is put in place in one step, at the end.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from megagent.envs.webshop import embedded
from megagent.envs.webshop.arrays import is_array_file, write_arrays
from megagent.envs.webshop.config import EMBEDDED
from megagent.envs.webshop.deal import Dealer
from megagent.envs.webshop.index_process import IndexProcess
from megagent.envs.webshop.product import Product
from megagent.envs.webshop.product_arrays import ProductArrays, encode
from megagent.envs.webshop.source import Reading, Source, open_folder, open_records
from megagent.envs.webshop.tagger import Tagger, best_tagger
from megagent.errors import CatalogError

_LONGEST_NAME = 200  # bytes of a file's name; most file systems take 255, and that of the scratch folder is longer
_STALE = 60.0  # seconds; a build locks its folder long before


@dataclass(frozen=True)
class Progress:
    """How far a build is."""

    stage: str  # "reading" | "indexing" | "writing"
    products: int
    read: int  # bytes of the products' file
    size: int  # bytes of the products' file; 0: not known


@dataclass(frozen=True)
class Built:
    """What a build did."""

    path: Path
    size: int  # bytes
    products: int
    dropped: int  # products left out for a fault
    faults: str  # of the products left out; empty without any
    notes: str  # what is worth knowing of the products that were kept; empty without any
    digest: str
    noun_source: str
    seconds: float


def open_source(name: str | Path, scratch: Path | None = None) -> Source:
    """The catalogue of a name: `embedded`, or a folder with files in the original's schema.

    Raises CatalogError if there is no such folder, or its files are not there.
    """
    if str(name) == EMBEDDED:
        return open_records(embedded.records())
    return open_folder(name, scratch)


def assemble(products: Iterable[Product], scratch: Path | None = None) -> tuple[dict[str, np.ndarray], str]:
    """The arrays of a catalogue, and the digest of its products.

    Given a scratch folder, what is large is kept there, and the index of a large catalogue is made by a second process.
    """
    records, dealer = ProductArrays(scratch), Dealer()
    with closing(IndexProcess(scratch)) as index:
        for product in products:
            record = encode(product)
            records.add_record(record)
            index.add_record(record)
            dealer.add(product)
        return {**records.finish(), **dealer.finish(), **index.finish()}, records.digest


def build_catalog(
    source: str | Path,
    out: Path,
    *,
    skip_bad: bool = False,
    overwrite: bool = False,
    tagger: Tagger | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Built:
    """Builds the catalogue `source` (see `open_source`) into the file `out`.

    Memory stays under 2 GiB for a million products. Raises CatalogError before anything is read if `out` cannot or must
    not be written, and after reading with all faults of all files; with `skip_bad`, products with faults are left out.
    Whatever goes wrong, `out` is as it was.
    """
    began = time.monotonic()
    check_out(out, overwrite=overwrite)
    target = Path(os.path.realpath(out))  # a link stays one, and what is large lies where it leads
    with _scratch_folder(target) as scratch, closing(open_source(source, scratch)) as records:
        reading = Reading(records, tagger or best_tagger(), skip_bad=skip_bad)
        arrays, digest = assemble(_watched(reading, on_progress), scratch)
        products = len(arrays["products/asins"])
        on_progress(Progress("writing", products, records.size, records.size))
        meta = {
            "products": products,
            "digest": digest,
            "noun_source": reading.noun_source,
            "source": Path(source).name,
            "dropped": reading.dropped,
        }
        finished = scratch / "catalog"
        with finished.open("wb") as file:
            write_arrays(file, arrays, meta)
        size = finished.stat().st_size
        check_out(out, overwrite=overwrite)  # a build takes minutes, and others write files too
        os.replace(finished, target)
    return Built(
        path=out,
        size=size,
        products=products,
        dropped=reading.dropped,
        faults=reading.report(),
        notes=reading.notes.report("note") if reading.notes.count else "",
        digest=digest,
        noun_source=reading.noun_source,
        seconds=time.monotonic() - began,
    )


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raises CatalogError if a catalogue cannot or must not be written to `out`."""
    # os.path's questions answer no where Path's raise: for names too long, or folders that may not be entered.
    if len(os.fsencode(out.name)) > _LONGEST_NAME:
        raise CatalogError(f"{out}: the name has more than {_LONGEST_NAME} bytes; choose a shorter one")
    parent = os.path.dirname(os.path.realpath(out))
    if not os.path.isdir(parent):
        raise CatalogError(f"{out}: the folder {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CatalogError(f"{out}: no permission to write in {parent}; choose another place")
    if os.path.isdir(out):
        raise CatalogError(f"{out}: is a folder; give the name of a file, such as {out / 'catalog.shop'}")
    if os.path.exists(out) and not is_array_file(out):
        raise CatalogError(f"{out}: exists and is not a built catalogue, so it is not replaced; choose another name")
    if os.path.exists(out) and not overwrite:
        raise CatalogError(f"{out}: exists; replace it with --overwrite, or choose another name")


def _watched(reading: Reading, on_progress: Callable[[Progress], None]) -> Iterator[Product]:
    source = reading.source
    for number, product in enumerate(reading):
        if number % 256 == 0:
            on_progress(Progress("reading", reading.seen, source.read(), source.size))
        yield product
    on_progress(Progress("indexing", reading.seen, source.size, source.size))


@contextmanager
def _scratch_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that is gone afterwards, with those that killed builds have left."""
    prefix = f".{out.name}.build-"
    for left in out.parent.glob(f"{glob.escape(prefix)}*"):
        _remove_stale(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        with _lock(folder / "lock"):
            yield folder
    except OSError as error:
        raise CatalogError(f"{out}: cannot be written ({error.strerror}); make room in {out.parent}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Removes the scratch folder of a build that is no longer running."""
    try:
        if not os.path.exists(folder / "lock") and time.time() - folder.stat().st_mtime < _STALE:
            return
        with _lock(folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its build is running, or has just removed it
        return


@contextmanager
def _lock(path: Path) -> Iterator[IO[bytes]]:
    """Holds a lock on a file until the end of the block, or of the process. Raises OSError if another has it."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
