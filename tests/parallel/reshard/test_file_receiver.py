"""The file receiver's checks, which need no engine; what it does to a model is in tests/rollout/test_engine.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from megagent.errors import MegagentError

pytest.importorskip("vllm")
from megagent.parallel.reshard import file_receiver

TENSORS = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "model.q_proj.bias": (6,)}


def write(path: Path, shapes: dict[str, tuple[int, ...]], version: str | None = None) -> str:
    metadata = None if version is None else {"version": version}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path, metadata=metadata)
    return str(path)


@pytest.fixture
def end(tmp_path: Path) -> file_receiver.FileReceiver:
    """A receiver for a model with tied embeddings; the model itself must not be reached."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "model.safetensors", TENSORS)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(tie_word_embeddings=True))
    vllm_config = SimpleNamespace(
        parallel_config=None, model_config=SimpleNamespace(model=str(folder), hf_config=config)
    )
    return file_receiver.FileReceiver(None, vllm_config, torch.device("cpu"), None)


def test_a_whole_file_in_the_right_version_passes(end: file_receiver.FileReceiver, tmp_path: Path) -> None:
    assert end.check(write(tmp_path / "new.safetensors", TENSORS, "3"), 3) is None


def test_a_tied_output_layer_may_come_along(end: file_receiver.FileReceiver, tmp_path: Path) -> None:
    shapes = TENSORS | {"lm_head.weight": (8, 4)}
    assert end.check(write(tmp_path / "new.safetensors", shapes), 3) is None


def test_all_faults_of_a_file_are_named_at_once(end: file_receiver.FileReceiver, tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (8, 5), "model.norm.weight": (4,), "model.extra": (1,)}
    problem = end.check(write(tmp_path / "new.safetensors", shapes), 3)
    assert problem is not None
    assert "missing (1): model.q_proj.bias" in problem
    assert "unexpected (1): model.extra" in problem
    assert "misshapen (1): model.embed_tokens.weight [8, 5] instead of [8, 4]" in problem


def test_a_file_of_another_version_is_refused(end: file_receiver.FileReceiver, tmp_path: Path) -> None:
    problem = end.check(write(tmp_path / "new.safetensors", TENSORS, "2"), 3)
    assert problem is not None
    assert "holds version 2, not version 3" in problem


def test_a_truncated_file_is_refused(end: file_receiver.FileReceiver, tmp_path: Path) -> None:
    path = Path(write(tmp_path / "new.safetensors", TENSORS))
    path.write_bytes(path.read_bytes()[:-8])
    problem = end.check(str(path), 3)
    assert problem is not None
    assert "cannot be read" in problem


def test_a_bad_file_is_refused_before_the_model_is_touched(end: file_receiver.FileReceiver, tmp_path: Path) -> None:
    end.start_weight_update()
    with pytest.raises(MegagentError, match="missing"):  # the model is None: touching it would raise something else
        end.update_weights({"path": write(tmp_path / "new.safetensors", {"model.norm.weight": (4,)}), "version": 3})
    assert end.version is None


def test_an_update_without_weights_cannot_be_ended(end: file_receiver.FileReceiver) -> None:
    end.start_weight_update()
    with pytest.raises(MegagentError, match="no weights came"):
        end.finish_weight_update()


def test_a_long_list_of_names_is_cut(end: file_receiver.FileReceiver) -> None:
    problem = file_receiver.compare_tensors("file", {f"w{number:03}": (1,) for number in range(50)}, {})
    assert problem is not None
    assert "missing (50): w000" in problem
    assert problem.endswith("and 30 more")


def test_shapes_of_a_sharded_checkpoint_are_read_from_its_index(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": (2,)})
    write(tmp_path / "model-00002-of-00002.safetensors", {"b": (3, 1)})
    write(tmp_path / "consolidated.safetensors", {"not.listed": (1,)})
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert file_receiver.checkpoint_shapes(tmp_path) == {"a": (2,), "b": (3, 1)}


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MegagentError, match="holds no safetensors file"):
        file_receiver.checkpoint_shapes(tmp_path)
