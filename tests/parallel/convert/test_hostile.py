"""Checkpoints that are damaged by chance or by intent: refused with a sentence, or read as if nothing had happened."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from megagent.cli import main
from megagent.errors import MegagentError
from megagent.parallel.convert import conversion, megatron_metadata, torch_record, untrusted
from megagent.parallel.convert.conversion import Options
from megagent.parallel.convert.stored import Stored
from megagent.parallel.degrees import Degrees
from tests.parallel.convert.folders import QUIET, Harmful, edit, write_folder

FC1, FC2 = "decoder.layers.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", "qwen2", files=2)


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    return conversion.to_megatron(model, tmp_path / "there", Degrees(), Options(quiet=True, shard_bytes=4000))


# --- by chance -------------------------------------------------------------------------------------------------------


def structure(stored: Stored) -> object:
    """Where which tensor lies: what no damage may change unnoticed."""
    return stored.layout, dict(stored.extents)


def around_the_weights(stored: Stored, path: Path) -> list[int]:
    """Positions in a file that are no weights, which carry no checksum."""
    positions = set(range(path.stat().st_size))
    for extent in stored.extents.values():
        if extent.path == str(path):
            positions -= set(range(extent.offset, extent.offset + extent.size))
    return sorted(positions)


def damaged(data: bytes, positions: list[int], draw: random.Random) -> bytes:
    """Some bits turned over, some bytes replaced, moved, put in or taken out, or the end cut off."""
    changed, at, kind = bytearray(data), draw.choice(positions), draw.randrange(5)
    if kind < 2:
        for place in draw.sample(positions, k=1 + kind):
            changed[place] ^= 1 << draw.randrange(8)
    elif kind == 2:
        changed[at : at + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(9))
    elif kind == 3:
        origin, count = draw.choice(positions), draw.randrange(1, 16)
        changed[at : at + count] = changed[origin : origin + count]
    else:
        del changed[draw.randrange(len(data)) :]
    return bytes(changed)


@pytest.mark.parametrize("kind", ["Hugging Face", "Megatron"])
def test_damage_by_chance_is_refused_or_changes_nothing(kind: str, model: Path, checkpoint: Path) -> None:
    draw = random.Random(4)
    folder = model if kind == "Hugging Face" else checkpoint
    sound = conversion.open_any(folder)
    files = {path: around_the_weights(sound, path) for path in sorted(folder.rglob("*")) if path.is_file()}
    refused = 0
    for _ in range(400):
        path = draw.choice(list(files))
        data = path.read_bytes()
        path.write_bytes(damaged(data, files[path], draw))
        try:
            assert structure(conversion.open_any(folder)) == structure(sound)
        except MegagentError:
            refused += 1
        path.write_bytes(data)
    assert refused > 100
    assert structure(conversion.open_any(folder)) == structure(sound)


# --- Hugging Face folders, by intent ---------------------------------------------------------------------------------


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def one(name: str, dtype: object, shape: object, offsets: object, after: bytes = bytes(16)) -> bytes:
    return header(json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()) + after


ENTRY = b'"a":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(b"{}" + bytes(100), length=1 << 63), "is cut off or no safetensors file"),
        (header(b"{}" + bytes(100), length=103), "is cut off or no safetensors file"),
        (header(b"{" + ENTRY + b"," + ENTRY + b"}") + bytes(16), "'a' is in it twice"),
        (one("a", "BF16", [8.0], [0, 16]), "has no readable header"),
        (one("a", "BF16", ["8"], [0, 16]), "has no readable header"),
        (one("a", "BF16", [True], [0, 16]), "has no readable header"),
        (one("a", "BF16", [-2, -4], [0, 16]), "has no readable header"),
        (one("a", "BF16", [1 << 63] * 2, [0, 16]), "has no readable header"),
        (one("a", "BF16", [1] * 100_000, [0, 2]), "has no readable header"),
        (one("a", ["BF16"], [8], [0, 16]), "has no readable header"),
        (one("a", "BF16", [8], [0, 16.0]), "has no readable header"),
        (one("a", "BF16", [8], [-16, 0]), "has no readable header"),
        (one("a\x1b[2J\n", "BF16", [8], [0, 16]), r"unexpected a\\x1b\[2J\\n BF16"),
        (one("a" * 5000, "BF16", [8], [0, 16]), "unexpected a{200,300}\\.\\.\\."),
        (header(b"{}"), "missing model.norm.weight"),
    ],
)
def test_a_header_that_lies_is_not_believed(data: bytes, message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small", "qwen2", num_hidden_layers=1)
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(MegagentError, match=message):
        conversion.open_any(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_a_pipe_instead_of_a_file_is_not_waited_for(name: str, model: Path) -> None:
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(MegagentError, match="it is no regular file"):
        conversion.open_any(model)


def test_an_index_with_one_tensor_twice_is_refused(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"weight_map": {', '"weight_map": {"model.norm.weight": "other",'))
    with pytest.raises(MegagentError, match="'model.norm.weight' is in it twice"):
        conversion.open_any(model)


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 10**12), ("vocab_size", 10**15)])
def test_a_config_of_a_model_beyond_all_measure_costs_no_memory(key: str, value: int, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(MegagentError, match=r"speaks of 1000000000000 layers|should be \[1000000000000000, 8\]"):
        conversion.open_any(model)


def test_a_tokenizer_that_is_cut_off_is_a_fault(model: Path, checkpoint: Path) -> None:
    for folder in (model, checkpoint / "hf"):
        (folder / "tokenizer.json").write_text('{"a": "token')
    for folder in (model, checkpoint):
        with pytest.raises(MegagentError, match="tokenizer.json cannot be read"):
            conversion.open_any(folder)


def test_a_tokenizer_whose_link_leads_nowhere_is_not_left_out(model: Path) -> None:
    (model / "vocab.txt").symlink_to(model / "gone")
    with pytest.raises(MegagentError, match="vocab.txt cannot be read .No such file"):
        conversion.open_any(model)


# --- distributed checkpoints, by intent ------------------------------------------------------------------------------


def place(metadata: dcp.Metadata, key: str, layer: int) -> Any:
    return next(
        info for index, info in metadata.storage_data.items() if index.fqn == key and list(index.offset)[:1] == [layer]
    )


def set_place(**changes: object) -> Callable[[dcp.Metadata], None]:
    return lambda metadata: vars(place(metadata, FC2, 1)).update(changes)


def same_bytes(metadata: dcp.Metadata) -> None:
    vars(place(metadata, FC2, 1)).update(vars(place(metadata, FC2, 2)))


def set_entry(**changes: object) -> Callable[[dcp.Metadata], None]:
    return lambda metadata: vars(metadata.state_dict_metadata[FC2]).update(changes)


def set_chunk(**changes: object) -> Callable[[dcp.Metadata], None]:
    return lambda metadata: vars(metadata.state_dict_metadata[FC2].chunks[1]).update(changes)


def overlapping(metadata: dcp.Metadata) -> None:
    chunks = metadata.state_dict_metadata[FC2].chunks
    chunks.append(chunks[1])


def other_name(metadata: dcp.Metadata) -> None:
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc3.weight"] = metadata.state_dict_metadata.pop(FC2)


def endless_chunk(metadata: dcp.Metadata) -> None:
    entry = metadata.state_dict_metadata[FC2]
    entry.chunks = [dcp.ChunkStorageMetadata(torch.Size([0, 0, 0]), torch.Size([4, 8, 0]))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_place(offset=-64), "cannot be read .* is .* bytes from -64 on"),
        (set_place(offset=1 << 70), "cannot be read .* bytes from 1180591620717411303424 on"),
        (set_place(offset=64.0), "a StorageInfo has no sound offset"),
        (set_place(offset=3), "is damaged|the same bytes"),
        (set_place(length=10), "has more than the 10 bytes there"),
        (set_place(length=1 << 40), "is cut off|the same bytes"),
        (set_place(relative_path="../../model/config.json"), "which is outside the folder"),
        (set_place(relative_path="/etc/passwd"), "which is outside the folder"),
        (set_place(relative_path="a\0b"), "which is outside the folder"),
        (set_place(relative_path="hf"), "it is no regular file"),
        (set_place(relative_path=None), "a StorageInfo has no sound relative_path"),
        (set_place(transform_descriptors=["zstd"]), "is stored compressed .zstd."),
        (same_bytes, "are said to be in the same bytes"),
        (set_chunk(sizes=torch.Size([1, 8, 13])), "which is no part of"),
        (set_chunk(sizes=torch.Size([1, 12, 8])), "which is no part of"),
        (set_chunk(sizes=torch.Size([1, 8])), "which is no part of"),
        (set_chunk(sizes=[1, "8", 12]), "a ChunkStorageMetadata has no sound sizes"),
        (set_chunk(sizes=torch.Size([1, 8, 11])), "more bytes than|not as announced|has elements that nothing"),
        (set_chunk(offsets=(-1, 0, 0)), "a ChunkStorageMetadata has no sound offsets"),
        (set_chunk(offsets=torch.Size([2, 0, 0])), "rank 0 holds two tensors|written to twice|the same bytes"),
        (set_entry(size=(1 << 80, 8, 12)), "a TensorStorageMetadata has no sound size"),
        (set_entry(size=torch.Size([4, 12, 8])), r"is \[4, 12, 8\] and should be \[4, 8, 12\]"),
        (set_entry(properties=dcp.TensorProperties(torch.float32)), "not as announced|has more than"),
        (set_entry(properties=dcp.TensorProperties(torch.float16)), "not as announced"),
        (set_entry(properties=dcp.TensorProperties(torch.int8)), "is int8 and should be one of"),
        (set_entry(properties=None), "has no sound properties"),
        (set_entry(chunks=[]), "has elements that nothing is written to|missing"),
        (set_entry(chunks={}), "has no sound chunks"),
        (endless_chunk, "which is no part of"),
        (overlapping, "the same bytes"),
        (other_name, f"missing {FC2}"),
        (lambda metadata: vars(metadata).update(storage_data=None), "a Metadata has no sound storage_data"),
        (lambda metadata: metadata.state_dict_metadata.update({7: None}), "a tensor has no name"),
    ],
)
def test_metadata_that_lies_is_not_believed(
    change: Callable[[dcp.Metadata], None], message: str, checkpoint: Path
) -> None:
    edit(checkpoint, change)
    with pytest.raises(MegagentError, match=message):
        conversion.open_any(checkpoint)


CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02" + CLASS + b"r\xff\xff\xff\x7f.", "it counts 2147483647 objects"),
        (b"\x80\x02" + CLASS + b"N}X\x01\x00\x00\x00aK\x01s\x86b.", "cannot be read"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"abc.", "cannot be read"),
        (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.", "it holds a os.system"),
        (b"\x80\x02cbuiltins\ngetattr\n.", "it holds a builtins.getattr"),
        (b"\x80\x02ctorch\nload\n.", "it holds a torch.load"),
        (b"", "cannot be read"),
        (b"N.", "a Metadata has no sound state_dict_metadata"),
    ],
)
def test_a_pickle_gets_nothing_to_work_with(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(MegagentError, match=message):
        megatron_metadata.read(tmp_path / ".metadata", ("optimizer.",))


def saved(tensor: torch.Tensor) -> bytes:
    record = io.BytesIO()
    torch.save(tensor, record)
    return record.getvalue()


def field(data: bytes, signature: bytes, entry: int, offset: int, value: bytes) -> bytes:
    """Data with a field of the n-th header of a kind replaced."""
    at = [n for n in range(len(data)) if data.startswith(signature, n)][entry] + offset
    return data[:at] + value + data[at + len(value) :]


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: field(data, LOCAL, 4, 26, struct.pack("<H", 15)),  # the name is longer
        lambda data: field(data, LOCAL, 4, 28, struct.pack("<H", 4)),  # the bytes begin earlier
        lambda data: field(data, LOCAL, 4, 28, struct.pack("<H", 30_000)),
        lambda data: field(data, LOCAL, 4, 6, struct.pack("<H", 0)),  # no descriptor follows
        lambda data: field(data, LOCAL, 4, 8, struct.pack("<H", 8)),  # compressed
        lambda data: field(data, CENTRAL, 4, 20, struct.pack("<I", 1000)),
        lambda data: field(data, CENTRAL, 4, 24, struct.pack("<I", 1000)),
        lambda data: field(data, CENTRAL, 4, 42, struct.pack("<I", 1)),
        lambda data: field(data, CENTRAL, 4, 42, struct.pack("<I", 1 << 31)),
        lambda data: field(data, CENTRAL, 0, 10, struct.pack("<H", 14)),  # lzma
        lambda data: field(data, CENTRAL, 0, 8, struct.pack("<H", 1)),  # encrypted
        lambda data: field(data, CENTRAL, 0, 24, struct.pack("<I", 1 << 31)),
        lambda data: data.replace(b"archive/data/0", b"archive/data/1"),
        lambda data: data.replace(b"archive/version", b"archive/data/0\0"),
        lambda data: data[:-1],
        lambda data: data[1:],
        lambda data: b"",
    ],
)
def test_an_archive_that_contradicts_itself_is_refused(damage: Callable[[bytes], bytes]) -> None:
    sound = saved(torch.arange(10.0))
    assert torch_record.find(io.BytesIO(sound)).shape == (10,)
    changed = damage(sound)
    assert changed != sound
    with pytest.raises(ValueError, match="."):
        torch_record.find(io.BytesIO(changed))


def test_a_memo_is_no_way_to_take_memory() -> None:
    with pytest.raises(pickle.UnpicklingError, match="it counts 268435456 objects in 8 bytes"):
        untrusted.check_pickle(b"N" + b"r" + struct.pack("<I", 1 << 28) + b"0.")


def test_common_state_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "common.pt").write_bytes(pickle.dumps(Harmful(tmp_path / "owned")))
    conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)
    assert not (tmp_path / "owned").exists()


# --- by command ------------------------------------------------------------------------------------------------------


def nothing(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


def no_weights(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.distcp")]:
        path.write_bytes(b"")


def no_json(folder: Path) -> None:
    for path in folder.rglob("*.json"):
        path.write_bytes(b"[" * 100_000)


def folders_for_files(folder: Path) -> None:
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("damage", [nothing, no_weights, no_json, folders_for_files])
@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
@pytest.mark.parametrize("kind", ["Hugging Face", "Megatron"])
def test_every_command_says_one_thing_of_a_broken_checkpoint_and_ends_with_status_2(
    kind: str,
    command: str,
    damage: Callable[[Path], None],
    model: Path,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    broken = model if kind == "Hugging Face" else checkpoint
    damage(broken)
    sound = write_folder(tmp_path / "sound", "qwen2")
    arguments = {
        "inspect": ["inspect", broken, "--digests"],
        "verify": ["verify", sound, broken],
        "convert": [{"Hugging Face": "hf-to-megatron", "Megatron": "megatron-to-hf"}[kind], broken, tmp_path / "new"],
    }[command]
    capsys.readouterr()
    assert main(["convert", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert str(broken) in printed.err
    assert not (tmp_path / "new").exists()
