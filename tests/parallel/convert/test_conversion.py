"""Conversions there and back keep every bit, and leave nothing that looks finished when they fail."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from megagent.errors import ConfigError, MegagentError
from megagent.parallel.convert import conversion, copying
from megagent.parallel.convert.conversion import Options
from megagent.parallel.degrees import Degrees
from tests.parallel.convert.folders import QUIET, random_weights, read_folder, same, write_folder
from tests.parallel.models.configs import TINY

FAMILIES = sorted(TINY)


def there_and_back(folder: Path, source: Path, degrees: Degrees = Degrees(), options: Options = QUIET) -> Path:  # noqa: B008
    conversion.to_megatron(source, folder / "there", degrees, options)
    return conversion.to_hf(folder / "there", folder / "back", None, options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_every_family_comes_back_bit_for_bit(family: str, tied: bool, tmp_path: Path) -> None:
    weights = random_weights(family, tie_word_embeddings=tied)
    source = write_folder(tmp_path / "model", family, weights, tie_word_embeddings=tied)
    assert same(read_folder(there_and_back(tmp_path, source)), weights)


def test_biases_of_every_linear_layer_come_back(tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    weights = random_weights("llama", **biases)
    source = write_folder(tmp_path / "model", "llama", weights, **biases)
    assert same(read_folder(there_and_back(tmp_path, source)), weights)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_padded_vocabulary_does_not_leak_out(tp: int, tmp_path: Path) -> None:
    weights = random_weights("qwen2")  # 50 entries
    source = write_folder(tmp_path / "model", "qwen2", weights)
    assert same(read_folder(there_and_back(tmp_path, source, Degrees(tp=tp))), weights)


def test_many_files_on_both_sides_change_nothing(tmp_path: Path) -> None:
    weights = random_weights("mixtral")
    source = write_folder(tmp_path / "model", "mixtral", weights, files=3)
    back = there_and_back(tmp_path, source, options=Options(quiet=True, shard_bytes=2000))
    assert len(list((tmp_path / "there").rglob("*.distcp"))) > 3
    assert len(list(back.glob("*.safetensors"))) > 3
    assert same(read_folder(back), weights)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())


def test_config_tokenizer_and_generation_settings_come_along(tmp_path: Path) -> None:
    back = there_and_back(tmp_path, write_folder(tmp_path / "model", "qwen2"))
    for name in ("tokenizer.json", "generation_config.json"):
        assert (back / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    config = json.loads((back / "config.json").read_text())
    assert config == {**TINY["qwen2"], "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_a_cast_is_torchs_cast(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_weights("qwen3_moe")
    source = write_folder(tmp_path / "model", "qwen3_moe", weights)
    conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(dtype=name, quiet=True))
    back = conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)
    assert same(read_folder(back), {key: tensor.to(dtype) for key, tensor in weights.items()})


def test_torch_reads_the_checkpoint_as_megatron_would(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    source = write_folder(tmp_path / "model", "qwen2", weights)
    folder = conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    key = "decoder.layers.mlp.linear_fc1.weight"
    state = {key: torch.empty(4, 24, 8, dtype=torch.bfloat16)}  # layers, gate over up, hidden
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    for layer in range(4):
        gate, up = (weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        assert torch.equal(state[key][layer], torch.cat([gate, up]))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_tp_that_does_not_divide_the_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "qwen2")
    with pytest.raises(ConfigError, match="parallel.tp=3 does not divide the 4 attention heads"):
        conversion.to_megatron(source, tmp_path / "there", Degrees(tp=3), QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_ep_that_does_not_divide_the_experts_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "mixtral")
    with pytest.raises(ConfigError, match="parallel.ep=3 does not divide the 4 experts"):
        conversion.to_megatron(source, tmp_path / "there", Degrees(ep=3, dp=3), QUIET)


def test_an_output_that_exists_is_left_alone(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "qwen2")
    conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*")}
    with pytest.raises(MegagentError, match="there exists already.*--overwrite"):
        conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "there").rglob("*")}


def test_overwrite_replaces_a_checkpoint(tmp_path: Path) -> None:
    conversion.to_megatron(write_folder(tmp_path / "old", "llama"), tmp_path / "there", Degrees(), QUIET)
    weights = random_weights("qwen2")
    source = write_folder(tmp_path / "model", "qwen2", weights)
    conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(overwrite=True, quiet=True))
    assert same(read_folder(conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)), weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model", "old", "there"]


def test_overwrite_does_not_remove_what_is_no_checkpoint(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "qwen2")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(MegagentError, match="home is no checkpoint, so it is not overwritten"):
        conversion.to_megatron(source, tmp_path / "home", Degrees(), Options(overwrite=True, quiet=True))
    assert (tmp_path / "home" / "thesis.tex").exists()


@pytest.mark.parametrize("out", ["model", "."])
def test_the_source_is_not_overwritten(out: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "qwen2")
    with pytest.raises(MegagentError, match="is, or holds, what is converted"):
        conversion.to_megatron(source, tmp_path / out, Degrees(), Options(overwrite=True, quiet=True))


def test_too_little_room_is_said_before_a_weight_is_written(tmp_path: Path) -> None:
    too_little = pytest.raises(MegagentError, match="there needs 1000000000.0 GB and its disk has .* left; make room")
    with too_little, conversion.Destination(tmp_path / "there") as destination:
        destination.require_space(10**18)
    assert list(tmp_path.iterdir()) == []


def fail_after(monkeypatch: pytest.MonkeyPatch, tasks: int, error: BaseException) -> list[int]:
    """Tasks of a few bytes, and an error instead of the one after so many. Returns the sizes of those that are done."""
    done: list[int] = []
    perform = copying._perform

    def limited(task: copying.Task) -> None:
        if len(done) == tasks:
            raise error
        perform(task)
        done.append(task.size)

    monkeypatch.setattr(copying, "TASK", 1)
    monkeypatch.setattr(copying, "_perform", limited)
    return done


def test_a_disk_that_fills_up_leaves_what_resume_goes_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights("qwen3")
    source = write_folder(tmp_path / "model", "qwen3", weights)
    with monkeypatch.context() as patch:
        fail_after(patch, 7, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(MegagentError, match="No space left on device; make room and go on with --resume"):
            conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".there.partial", "model"]
    with monkeypatch.context() as patch:
        resumed = fail_after(patch, -1, AssertionError())
        conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(resume=True, quiet=True))
    with monkeypatch.context() as patch:
        anew = fail_after(patch, -1, AssertionError())
        conversion.to_megatron(source, tmp_path / "again", Degrees(), QUIET)
    assert len(anew) - len(resumed) == 7
    assert same(read_folder(conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)), weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "back", "model", "there"]


def test_resume_starts_over_when_the_source_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_folder(tmp_path / "model", "qwen3")
    with monkeypatch.context() as patch:
        fail_after(patch, 7, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    weights = {name: tensor + 1 for name, tensor in random_weights("qwen3").items()}
    changed = write_folder(tmp_path / "changed", "qwen3", weights)
    os.replace(changed / "model.safetensors", source / "model.safetensors")
    conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(resume=True, quiet=True))
    assert same(read_folder(conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)), weights)


def test_two_conversions_do_not_write_one_folder(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "qwen2")
    with (
        conversion.Destination(tmp_path / "there"),
        pytest.raises(MegagentError, match="another process is writing"),
    ):
        conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)


def test_tensors_of_two_dtypes_do_not_go_into_one(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].float()
    source = write_folder(tmp_path / "model", "qwen2", weights)
    with pytest.raises(MegagentError, match="linear_fc1.weight is made of BF16 and F32 tensors; choose one --dtype"):
        conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(dtype="fp32", quiet=True))


@pytest.mark.parametrize(
    ("resume", "boot", "left"), [(True, "one", {0, 2}), (False, "one", set()), (True, "two", set())]
)
def test_finished_tasks_count_for_resume_and_until_the_machine_is_started_again(
    resume: bool, boot: str, left: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megagent.parallel.convert.destination._boot", lambda: "one")
    with conversion.Destination(tmp_path / "there") as destination:
        assert destination.begin(["work"]) == set()
        destination.done(0)
        destination.done(2)
    with open(tmp_path / ".there.partial" / ".journal", "a") as journal:
        journal.write("1")  # a line that a kill cut off
    monkeypatch.setattr("megagent.parallel.convert.destination._boot", lambda: boot)
    with conversion.Destination(tmp_path / "there", resume=resume) as destination:
        assert destination.begin(["work"]) == left
        destination.done(3)
    with conversion.Destination(tmp_path / "there", resume=True) as destination:
        assert destination.begin(["work"]) == {*left, 3}


def test_resume_starts_over_when_the_vocabulary_is_padded_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_weights("qwen2")
    source = write_folder(tmp_path / "model", "qwen2", weights)
    with monkeypatch.context() as patch:
        fail_after(patch, 20, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    conversion.to_megatron(source, tmp_path / "there", Degrees(tp=2), Options(resume=True, quiet=True))
    assert same(read_folder(conversion.to_hf(tmp_path / "there", tmp_path / "back", None, QUIET)), weights)


def test_a_weight_beyond_the_dtypes_range_is_an_error_and_not_infinite(tmp_path: Path) -> None:
    weights = random_weights("qwen2")
    weights["model.norm.weight"][3] = 1e6
    source = write_folder(tmp_path / "model", "qwen2", weights)
    with pytest.raises(MegagentError, match="weights up to 9.99e.05, and F16 ends at 6.55e.04; choose another --dtype"):
        conversion.to_megatron(source, tmp_path / "there", Degrees(), Options(dtype="fp16", quiet=True))
    assert not (tmp_path / "there").exists()


def test_an_output_that_is_a_link_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", "qwen2")
    os.symlink(tmp_path / "nowhere", tmp_path / "there")
    with pytest.raises(MegagentError, match="there is a link; give the folder that it leads to"):
        conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "there"]


def test_a_disk_that_is_full_from_the_start_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = write_folder(tmp_path / "model", "qwen2")
    monkeypatch.setattr("megagent.parallel.convert.megatron_folder.write_sparse", full)
    with pytest.raises(MegagentError, match="No space left on device; make room"):
        conversion.to_megatron(source, tmp_path / "there", Degrees(), QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_lock_on_a_folder_that_was_renamed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> None:
        os.rename(tmp_path / ".there.partial", tmp_path / "there")

    monkeypatch.setattr("megagent.parallel.convert.destination.fcntl.flock", late)
    with pytest.raises(MegagentError, match="another process has just ended writing"):
        conversion.Destination(tmp_path / "there").__enter__()
