"""Distributed checkpoints are read with the same distrust, and their pickles cannot do anything."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from megagent.errors import MegagentError
from megagent.parallel.convert import conversion, megatron_folder, torch_record
from megagent.parallel.degrees import Degrees
from tests.parallel.convert.folders import QUIET, Harmful, edit, write_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return conversion.to_megatron(write_folder(tmp_path / "model", "qwen2"), tmp_path / "there", Degrees(), QUIET)


def test_all_faults_are_listed_together(checkpoint: Path) -> None:
    def change(metadata: dcp.Metadata) -> None:
        entries, properties = metadata.state_dict_metadata, dcp.TensorProperties(torch.bfloat16)
        del entries["decoder.final_layernorm.weight"]
        entries["decoder.layers.mlp.linear_fc3.weight"] = dcp.TensorStorageMetadata(properties, torch.Size((4, 8)), [])
        fc2 = entries["decoder.layers.mlp.linear_fc2.weight"]
        fc2.size = torch.Size((4, 8, 13))
        del metadata.storage_data[dcp.MetadataIndex("output_layer.weight", torch.Size((0, 0)))]

    edit(checkpoint, change)
    with pytest.raises(MegagentError) as raised:
        conversion.open_any(checkpoint)
    assert sorted(str(raised.value).splitlines()[1:]) == [
        "  decoder.layers.mlp.linear_fc2.weight is [4, 8, 13] and should be [4, 8, 12]",
        "  missing decoder.final_layernorm.weight [8]",
        "  output_layer.weight: the metadata does not say where its chunk from [0, 0] on is",
        "  unexpected decoder.layers.mlp.linear_fc3.weight [4, 8]",
    ]


def test_a_chunk_that_is_left_out_is_missed(checkpoint: Path) -> None:
    edit(checkpoint, lambda metadata: metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop())
    with pytest.raises(MegagentError, match="model.layers.3.mlp.down_proj.weight has elements that nothing is written"):
        conversion.open_any(checkpoint)


def test_a_file_that_is_cut_off_is_found_before_anything_is_written(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(MegagentError, match="__0_0.distcp is cut off"):
        conversion.to_hf(checkpoint, tmp_path / "back", None, QUIET)
    assert not (tmp_path / "back").exists()


def test_a_damaged_archive_is_found(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data.replace(b"PK\x01\x02", b"XX\x01\x02", 1))
    with pytest.raises(MegagentError, match="embedding.word_embeddings.weight.* is damaged: it is no archive of torch"):
        conversion.open_any(checkpoint)


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(MegagentError, match="__0_0.distcp: No such file"):
        conversion.open_any(checkpoint)


def test_an_unfinished_checkpoint_is_not_read(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()
    with pytest.raises(MegagentError, match="has no .metadata: it is not complete"):
        conversion.open_any(checkpoint)


def test_a_checkpoint_without_config_asks_for_the_model(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "hf" / "config.json").unlink()
    with pytest.raises(MegagentError, match="name its Hugging Face folder with --model"):
        conversion.open_any(checkpoint)
    assert conversion.open_any(checkpoint, model=tmp_path / "model").kind == "Megatron"


def test_a_pickle_in_the_metadata_runs_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "owned")))
    with pytest.raises(MegagentError, match="cannot be read .it holds a posix.mkdir"):
        conversion.open_any(checkpoint)
    assert not (tmp_path / "owned").exists()


def test_a_pickle_in_a_chunk_runs_nothing(tmp_path: Path) -> None:
    record = io.BytesIO()
    with zipfile.ZipFile(record, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Harmful(tmp_path / "owned")))
    with pytest.raises(ValueError, match="it holds a posix.mkdir"):
        torch_record.find(record)
    assert not (tmp_path / "owned").exists()


def test_the_newest_of_several_checkpoints_is_taken(tmp_path: Path) -> None:
    for name in ("iter_0000010", "iteration_0000003", "release"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text("{}")
    (tmp_path / "latest").write_text("iteration_0000003\n")
    assert megatron_folder.resolve(tmp_path).name == "iteration_0000003"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert megatron_folder.resolve(tmp_path).name == "iter_0000010"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert megatron_folder.resolve(tmp_path).name == "release"


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_an_archive_made_around_bytes_is_what_torch_reads(dtype: str) -> None:
    tensor = torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(0)).to(megatron_folder._TORCH_DTYPES[dtype])
    head, size, tail = torch_record.frame(dtype, tuple(tensor.shape))
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    record = io.BytesIO(head + data + tail)
    assert size == len(data)
    assert torch.equal(torch.load(record, weights_only=True), tensor)
    assert torch_record.find(record) == (dtype, (3, 1, 5), len(head))


def test_an_archive_of_torch_is_found_where_its_bytes_are() -> None:
    tensor, record = torch.arange(24.0).reshape(2, 12), io.BytesIO()
    torch.save(tensor[1:], record)  # a view: the storage has more than the tensor
    dtype, shape, offset = torch_record.find(record)
    assert (dtype, shape) == ("F32", (1, 12))
    assert torch.equal(
        torch.frombuffer(bytearray(record.getvalue()[offset : offset + 48]), dtype=torch.float32), tensor[1]
    )


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    record = io.BytesIO()
    torch.save(torch.zeros(3, 4).T, record)
    with pytest.raises(ValueError, match="not contiguous"):
        torch_record.find(record)


@pytest.mark.parametrize("named", [b"", b"\xff\xfe", "\u00b2".encode(), b"a\0b", b"9" * 5000, b"17", b"gone"])
def test_a_tracker_that_leads_nowhere_is_one_clear_error(named: bytes, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(named)
    with pytest.raises(MegagentError, match="says that the newest checkpoint is .*, which is none"):
        megatron_folder.resolve(tmp_path)
