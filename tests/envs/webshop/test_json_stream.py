from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagent.envs.webshop import json_stream
from megagent.envs.webshop.json_stream import JsonFile
from megagent.errors import CatalogError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
PIECES = (1, 3, 64)  # bytes read at a time
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def elements(path):
    with JsonFile(path) as file:
        return list(file.elements())


def entries(path):
    with JsonFile(path) as file:
        return list(file.entries())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("json")


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("indent", [None, 1])
@SETTINGS
@given(values=st.lists(VALUES, max_size=5))
def test_a_list_is_read_as_json_reads_it_wherever_the_pieces_end(folder, piece, indent, values):
    path = folder / "list.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False).encode("utf-8", "replace").decode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_PIECE", piece)
        assert elements(path) == json.loads(path.read_text())


@pytest.mark.parametrize("piece", PIECES)
@SETTINGS
@given(values=st.dictionaries(st.text(max_size=4), VALUES, max_size=5))
def test_an_object_gives_its_entries_as_the_text_they_are(folder, piece, values):
    path = folder / "object.json"
    path.write_text(json.dumps(values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_PIECE", piece)
        assert {name: json.loads(text) for name, text in entries(path)} == values


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    "content",
    ['[{"a": 1},\n {"b": 2},\n {"c', "[1, 2", "[1 2]", "[1,, 2]", '["a\nb"]', "[1] [2]", "", "  \n", "[tru]", "[1,]"],
)
def test_a_broken_list_is_named_with_the_line_and_column_that_json_names(tmp_path, monkeypatch, piece, content):
    monkeypatch.setattr(json_stream, "_PIECE", piece)
    with pytest.raises(json.JSONDecodeError) as right:
        json.loads(content)
    (tmp_path / "x.json").write_text(content)
    place = f"x.json: not whole JSON, it breaks at line {right.value.lineno}, column {right.value.colno} "
    with pytest.raises(CatalogError) as caught:
        elements(tmp_path / "x.json")
    assert place in str(caught.value)


def test_an_entry_without_a_quoted_name_is_named_with_the_place(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1,\n 2: 3}')
    with pytest.raises(CatalogError, match="line 2, column 2 .*property name"):
        entries(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'["ab", \xff]', "x.json: not UTF-8 text at byte 7"),
        ("x.json", '["é'.encode()[:-1], "x.json: not UTF-8 text at byte 2"),
        ("x.json.gz", gzip.compress(b"[" + b"9, " * 99)[:-9], "x.json.gz: the compressed file is damaged or cut short"),
        ("x.json.gz", b"[]", "x.json.gz: the compressed file is damaged or cut short"),
        ("x.json", b"[" * 9_999, "x.json: not whole JSON"),
        ("x.json", b"[" + b"9" * 5000 + b"]", "x.json: not whole JSON, it breaks at line 1, column 2"),
    ],
)
@pytest.mark.parametrize("piece", [2, 1 << 20])
def test_a_damaged_file_is_named_with_the_place(tmp_path, monkeypatch, piece, name, content, message):
    monkeypatch.setattr(json_stream, "_PIECE", piece)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CatalogError, match=message):
        elements(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CatalogError, match=r"x.json: cannot be read \(No such file"):
        JsonFile(tmp_path / "x.json")


def test_a_text_that_is_never_closed_does_not_draw_in_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "_PIECE", 64)
    monkeypatch.setattr(json_stream, "_LONGEST", 1000)
    (tmp_path / "x.json").write_text('["' + "x" * 100_000)
    with JsonFile(tmp_path / "x.json") as file:
        with pytest.raises(CatalogError, match="line 1, column 2 .*Unterminated string"):
            list(file.elements())
        assert file.position < 2000


def test_elements_come_before_the_file_is_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "_PIECE", 64)
    (tmp_path / "x.json").write_text(json.dumps(list(range(10_000))))
    with JsonFile(tmp_path / "x.json") as file:
        found = file.elements()
        assert [next(found) for _ in range(3)] == [0, 1, 2]
        assert file.position < file.size / 2
