"""JSON files larger than memory: one element of the outer list, or one entry of the outer object, at a time.

A file is read in pieces, plain or .gz. An element is decoded by the standard library's decoder as soon as the pieces
read so far hold all of it, so that memory is bounded by the longest element and not by the file.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from megagent.errors import CatalogError

_PIECE = 1 << 20  # bytes read at a time
_LONGEST = 1 << 24  # characters of one element; a string that is never closed must not draw in the whole file
_SPACE = re.compile(r"[ \t\r\n]*")
_GOES_ON = ("", *"0123456789.eE+-")
_DECODE = json.JSONDecoder().raw_decode


class JsonFile:
    """A JSON file read from front to back, once.

    Raises CatalogError, from any method, if the file cannot be read, is not UTF-8, is cut short or is not JSON: with
    the place where it breaks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = ""
        self._at = 0  # what comes before it in `_text` is done with
        self._line = 1  # of the first character of `_text`
        self._column = 1
        self._bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            self.size = path.stat().st_size  # bytes on disk
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise CatalogError(f"{path}: cannot be read ({error.strerror})") from None
        packed = path.name.endswith(".gz")
        self._pieces = cast("IO[bytes]", gzip.GzipFile(fileobj=self._file)) if packed else self._file

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """Bytes of the file on disk that have been read."""
        return self._file.tell()

    def kind(self) -> str:
        """The first character that is no space: "[" of a list, "{" of an object. CatalogError if there is none."""
        return self._next() or self._break("Expecting value", self._at)

    def elements(self) -> Iterator[Any]:
        """The elements of the list that the file holds, decoded."""
        yield from (value for value, _ in self._sequence("[", "]"))

    def entries(self) -> Iterator[tuple[str, str]]:
        """The entries of the object that the file holds: the name, and the value as JSON text, known to be valid."""
        yield from self._sequence("{", "}")

    def _sequence(self, opening: str, closing: str) -> Iterator[tuple[Any, str]]:
        self._expect(opening)
        if self._next() == closing:
            self._at += 1
        else:
            while True:
                value, text = self._value()
                if opening == "{":
                    if not isinstance(value, str):
                        self._break("Expecting property name enclosed in double quotes", self._at - len(text))
                    self._expect(":")
                    text = self._value()[1]
                yield value, text
                if self._next() == closing:
                    self._at += 1
                    break
                self._expect(",")
        if self._next():
            self._break("Extra data", self._at)

    def _value(self) -> tuple[Any, str]:
        """The next value, and its text."""
        self._next()
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > _LONGEST or not self._more():
                    self._break(error.msg, error.pos)
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists a thousand deep
                self._break(str(error), self._at)
            else:
                # A number that seems to end where the piece ends may go on in the next one: "1." of "1.5".
                goes_on = isinstance(value, int | float) and self._text[end : end + 1] in _GOES_ON
                if not goes_on or len(self._text) - self._at > _LONGEST or not self._more():
                    text = self._text[self._at : end]
                    self._at = end
                    return value, text

    def _expect(self, character: str) -> None:
        if self._next() != character:
            self._break(f"Expecting {character!r}", self._at)
        self._at += 1

    def _next(self) -> str:
        """The next character that is no space, not consumed; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Reads one more piece, and lets go of what is done with. False at the end of the file."""
        text = ""
        while not text:
            try:
                piece = self._pieces.read(_PIECE)
                text = self._decoder.decode(piece, final=not piece)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise CatalogError(
                    f"{self.path}: the compressed file is damaged or cut short ({error}); copy it again"
                ) from None
            except UnicodeDecodeError as error:
                waiting = len(self._decoder.getstate()[0])
                place = self._bytes - waiting + error.start
                raise CatalogError(f"{self.path}: not UTF-8 text at byte {place}; copy the file again") from None
            except OSError as error:
                raise CatalogError(f"{self.path}: cannot be read ({error.strerror})") from None
            self._bytes += len(piece)
            if not piece:
                break
        if not text:
            return False
        self._line, self._column = self._place(self._at)
        self._text = self._text[self._at :] + text
        self._at = 0
        return True

    def _place(self, at: int) -> tuple[int, int]:
        """Line and column, from 1, of a character of `_text`."""
        lines = self._text.count("\n", 0, at)
        if not lines:
            return self._line, self._column + at
        return self._line + lines, at - self._text.rindex("\n", 0, at)

    def _break(self, what: str, at: int) -> Any:
        line, column = self._place(at)
        raise CatalogError(
            f"{self.path}: not whole JSON, it breaks at line {line}, column {column} ({what}); copy the file again"
        )
