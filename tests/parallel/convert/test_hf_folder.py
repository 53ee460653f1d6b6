"""What a Hugging Face folder may get wrong is found before a weight is read, and all of it is said at once."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megagent.errors import MegagentError
from megagent.parallel.convert import hf_folder
from tests.parallel.convert.folders import random_weights, write_folder, write_index

WEIGHTS = "model.safetensors"


def test_all_faults_of_tensors_are_listed_together(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    del weights["model.norm.weight"]
    weights["model.layers.4.mlp.up_proj.weight"] = torch.zeros(12, 8, dtype=torch.bfloat16)
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 8, dtype=torch.bfloat16)
    weights["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(8, dtype=torch.int8)
    folder = write_folder(tmp_path / "model", "qwen2", weights)
    with pytest.raises(MegagentError) as raised:
        hf_folder.open_folder(folder)
    assert sorted(str(raised.value).splitlines()[1:]) == [
        "  missing model.norm.weight [8]",
        "  model.layers.0.self_attn.q_proj.weight is [4, 8] and should be [8, 8]",
        "  model.layers.1.self_attn.q_proj.bias is I8 and should be one of BF16, F16, F32, F64",
        "  unexpected model.layers.4.mlp.up_proj.weight BF16 [12, 8]",
    ]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:50])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 4) + b"\xff\xfe{}" + bytes(100))


def edited(change: Callable[[dict[str, dict[str, object]]], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


def overlapping(header: dict[str, dict[str, object]]) -> None:
    header["model.norm.weight"]["data_offsets"] = [0, 16]


def three_offsets(header: dict[str, dict[str, object]]) -> None:
    header["model.norm.weight"]["data_offsets"] = [0, 16, 32]


def endless(header: dict[str, dict[str, object]]) -> None:
    header["model.norm.weight"]["shape"] = [float("inf")]


def nested(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000)


def too_large(header: dict[str, dict[str, object]]) -> None:
    header["model.norm.weight"]["shape"] = [9]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "model.safetensors is .* bytes and its header speaks of .*: it is cut off"),
        (cut_in_the_header, r"model.safetensors is cut off or no safetensors file \(50 bytes\)"),
        (empty, r"model.safetensors is cut off or no safetensors file \(0 bytes\)"),
        (no_header, "model.safetensors has no readable header"),
        (nested, "model.safetensors has no readable header"),
        (edited(three_offsets), "model.safetensors has no readable header"),
        (edited(endless), "model.safetensors has no readable header"),
        (edited(overlapping), "the bytes of .* do not follow those of the tensor before"),
        (edited(too_large), r"model.norm.weight has 16 bytes, and BF16 \[9\] needs others"),
    ],
)
def test_a_damaged_file_is_found_by_its_header(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen2")
    damage(folder / WEIGHTS)
    with pytest.raises(MegagentError, match=message):
        hf_folder.open_folder(folder)


def test_an_index_that_lies_is_not_believed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen2", files=2)
    path = folder / hf_folder.INDEX
    weight_map = json.loads(path.read_text())["weight_map"]
    one, two = sorted(set(weight_map.values()))
    weight_map["model.norm.weight"] = one if weight_map["model.norm.weight"] == two else two
    weight_map["model.extra.weight"] = one
    del weight_map["model.embed_tokens.weight"]
    write_index(folder, weight_map)
    with pytest.raises(MegagentError) as raised:
        hf_folder.open_folder(folder)
    for sentence in (
        f"says that model.norm.weight is in {weight_map['model.norm.weight']}, which has no such tensor",
        f"says that model.extra.weight is in {one}, which has no such tensor",
        "model.embed_tokens.weight is in model-00001-of-00002.safetensors and not in",
    ):
        assert sentence in str(raised.value)


def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen2")
    write_index(folder, dict.fromkeys(random_weights("qwen2"), "../model.safetensors"))
    with pytest.raises(MegagentError, match="names '../model.safetensors', which is outside the folder"):
        hf_folder.open_folder(folder)


def test_a_missing_file_is_named_without_its_tensors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen2", files=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MegagentError) as raised:
        hf_folder.open_folder(folder)
    assert str(raised.value).splitlines()[1:] == ["  model-00002-of-00002.safetensors is missing"]


def test_a_tensor_in_two_files_is_a_fault(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    folder = write_folder(tmp_path / "model", "qwen2", weights, files=2)
    twice = write_folder(tmp_path / "other", "qwen2", weights)
    (twice / WEIGHTS).rename(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(
        MegagentError, match="model.embed_tokens.weight is in model-00001-of-00002.* and in model-00002"
    ):
        hf_folder.open_folder(folder)


@pytest.mark.parametrize("equal", [True, False])
def test_a_stored_copy_of_tied_weights_has_to_be_a_copy(equal: bool, tmp_path: Path) -> None:
    weights = random_weights("qwen2", tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0 if equal else 1)
    folder = write_folder(tmp_path / "model", "qwen2", weights, tie_word_embeddings=True)
    if equal:
        assert "lm_head.weight" not in hf_folder.open_folder(folder).dtypes
        return
    with pytest.raises(MegagentError, match="lm_head.weight differs from model.embed_tokens.weight"):
        hf_folder.open_folder(folder)


@pytest.mark.parametrize(("file", "message"), [("config.json", "has no config.json"), (WEIGHTS, "has neither")])
def test_a_folder_that_is_no_model_is_refused(file: str, message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen2")
    (folder / file).unlink()
    with pytest.raises(MegagentError, match=message):
        hf_folder.open_folder(folder)


def test_one_file_beside_the_index_of_others_is_a_fault(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen2", files=2)
    other = write_folder(tmp_path / "other", "qwen2")
    (other / WEIGHTS).rename(folder / WEIGHTS)
    with pytest.raises(MegagentError, match="a model.safetensors that model.safetensors.index.json does not name"):
        hf_folder.open_folder(folder)
