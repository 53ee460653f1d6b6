"""Reading what somebody else made: nothing is believed, nothing in it runs, and no lie costs memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megagent.errors import MegagentError

LONGEST_JSON = 100_000_000  # bytes, as the safetensors library has it for headers
_MOST_AXES = 8
_SHOWN, _SHOWN_OF_EACH = 40, 300


def open_regular(path: Path) -> io.BufferedReader:
    """The file, opened for reading. Raises OSError, also for what could block or never end: a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Raises MegagentError if the file is not there, holds no JSON object, or says one thing twice."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > LONGEST_JSON:
                raise ValueError(f"it has more than {LONGEST_JSON} bytes")
            content = parse_json(file.read(LONGEST_JSON))
    except FileNotFoundError:
        raise MegagentError(f"{path.parent} has no {path.name}; give the folder of a model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise MegagentError(f"{path} cannot be read ({error}); download or export it again") from None
    if not isinstance(content, dict):
        raise MegagentError(f"{path} holds no JSON object; download or export it again")
    return content


def parse_json(text: bytes) -> Any:
    """Raises ValueError (or RecursionError) if it is no JSON, or an object has one name twice."""
    return json.loads(text.decode("utf-8"), object_pairs_hook=_named_once)


def is_shape(value: object) -> bool:
    """Whether this is a tuple or list of sizes or offsets that a tensor can have."""
    return isinstance(value, tuple | list) and len(value) <= _MOST_AXES and all(map(is_count, value))


def is_count(value: object) -> bool:
    """Whether this is a whole number from 0 to what a file can have of bytes."""
    return type(value) is int and 0 <= value < 1 << 62


def check_pickle(data: bytes) -> None:
    """Raises ValueError unless this is one whole pickle that takes no more memory than its length explains."""
    for code, argument, _ in pickletools.genops(data):
        # A memo has room for as many objects as its largest index says, all of it written: a few bytes, gigabytes.
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(data):
            raise pickle.UnpicklingError(f"it counts {argument} objects in {len(data)} bytes")


def refuse(folder: Path, faults: Sequence[str]) -> None:
    """Raises MegagentError that lists the faults of a checkpoint, if there are any."""
    if faults:
        lines = "".join(f"\n  {_printable(fault)}" for fault in faults[:_SHOWN])
        more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        noun = "fault" if len(faults) == 1 else "faults"
        raise MegagentError(f"{folder}: {len(faults)} {noun}; take a complete copy of one model:{lines}{more}")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"{twice[:_SHOWN]!r} is in it twice")
    return found


def _printable(text: str) -> str:
    """Names in a file may be anything: sequences that a terminal obeys, or a megabyte."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[:_SHOWN_OF_EACH])
    return shown if len(text) <= _SHOWN_OF_EACH else f"{shown}..."
