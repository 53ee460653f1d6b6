"""Hugging Face folders in and out of Megatron ranks: the same bytes back, clear errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megagent.config import Config
from megagent.errors import MegagentError
from megagent.model_source import hf_config_of
from tests.parallel import families, jobs
from tests.parallel.jobs import Layout
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow

# On four ranks; test_families.py has every family at more layouts. tp=4 is more than the tied model's key/value heads.
CASES: list[tuple[str, Layout]] = [
    ("tied", {"tp": 4}),
    ("untied", {"tp": 2, "dp": 2}),
    ("mixture", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}),
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("tied", "untied", "mixture")}
    jobs.write_tiny_model(folders["tied"])
    jobs.write_tiny_model(folders["untied"], tie_word_embeddings=False, num_key_value_heads=4, head_dim=16)
    families.write_model(folders["mixture"], "mixtral")
    for folder in folders.values():
        (folder / "tokenizer.json").write_text("{}")
        (folder / "LICENSE").write_text("free")
    return folders


def exported_all(start: jobs.Start, configs: list[Config], exports: list[str]) -> None:
    for config, export in zip(configs, exports, strict=True):
        start(config).export_hf(export)


def test_what_is_written_is_what_was_read_with_all_that_belongs_to_it(
    ranks: RankPool, model_of: dict[str, Path], tmp_path: Path
) -> None:
    configs = [jobs.laid_out(model_of[model], layout) for model, layout in CASES]
    outs = [tmp_path / str(number) for number in range(len(CASES))]
    ranks.run(exported_all, 4, configs=configs, exports=[str(out) for out in outs], starts=len(CASES))
    for (model, layout), out in zip(CASES, outs, strict=True):
        source, written = load_file(model_of[model] / "model.safetensors"), load_file(out / "model.safetensors")
        assert source.keys() == written.keys(), layout
        assert all(torch.equal(source[name], written[name]) for name in source), layout
        assert {path.name for path in out.iterdir()} == {path.name for path in model_of[model].iterdir()}


def test_transformers_loads_a_sharded_export_and_so_do_we(
    ranks: RankPool, model_of: dict[str, Path], tmp_path: Path
) -> None:
    folder, out, again = model_of["tied"], tmp_path / "out", tmp_path / "again"
    ranks.run(exported, 2, config=jobs.make_config(folder, tp=2), export=str(out), shard_bytes=20_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) > index["metadata"]["total_size"]
    weights, loaded = (families.load_model(each).state_dict() for each in (folder, out))
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    ranks.run(exported, 2, config=jobs.make_config(out, tp=2), export=str(again), shard_bytes=1 << 30)
    source, written = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(torch.equal(source[name], written[name]) for name in source)


def exported(start: jobs.Start, config: Config, export: str, shard_bytes: int = 1 << 30) -> None:
    from megagent.parallel import hf_io

    source = config.model.path
    hf_io.export_hf(start(config).policy.stage, export, hf_config_of(source), source, shard_bytes)


def test_weights_are_cast_and_the_config_says_so(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    config = jobs.make_config(tiny_model, tp=2)
    config.model.dtype = "bf16"
    ranks.run(exported, 2, config=config, export=str(tmp_path / "out"))
    source, written = load_file(tiny_model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(source[name].bfloat16(), written[name]) for name in source)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


AWAY = {"weight_map": {"model.norm.weight": "../part/gone.safetensors"}}


def refusals(start: jobs.Start, config: Config, folders: list[str]) -> tuple[list[str], bool]:
    """A job: what loading each folder into a good model says, and whether the model is as it was."""
    from megagent.parallel import hf_io

    stage = start(config).policy.stage
    before = [parameter.detach().clone() for parameter in stage.parameters()]
    said = []
    for folder in folders:
        try:
            hf_io.load_hf(stage, folder)
            said.append("")
        except MegagentError as error:
            said.append(str(error))
    return said, all(torch.equal(one, two) for one, two in zip(before, stage.parameters(), strict=True))


@contextmanager
def changed(folder: Path, to: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a folder, to be changed and then written to another one."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    to.mkdir()
    save_file(tensors, to / "model.safetensors")


def test_wrong_weights_are_refused_with_every_name_and_change_nothing(
    ranks: RankPool, tiny_model: Path, tmp_path: Path
) -> None:
    bad = [
        tmp_path / name
        for name in ("many", "integers", "untied", "empty", "broken", "part", "index", "twice", "outside")
    ]
    with changed(tiny_model, bad[0]) as tensors:
        del tensors["model.layers.3.self_attn.k_proj.bias"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
        tensors["model.layers.4.mlp.up_proj.weight"] = torch.zeros(2)
    with changed(tiny_model, bad[1]) as tensors:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].int()
    with changed(tiny_model, bad[2]) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    bad[3].mkdir()
    bad[4].mkdir()
    (bad[4] / "model.safetensors").write_bytes(b"no header")
    for broken, index in (
        (bad[5], {"weight_map": {"model.norm.weight": "gone.safetensors"}}),
        (bad[6], []),
        (bad[8], AWAY),
    ):
        broken.mkdir()
        (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with changed(tiny_model, bad[7]) as tensors:
        pass
    (bad[7] / "model.safetensors").rename(bad[7] / "one.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, bad[7] / "two.safetensors")
    names = dict.fromkeys(tensors, "one.safetensors") | {"lm_head.bias": "two.safetensors"}
    (bad[7] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    answers = ranks.run(refusals, 2, config=jobs.make_config(tiny_model, tp=2), folders=[str(path) for path in bad])
    for said, untouched in answers:
        assert untouched
        for words in (
            "missing model.layers.3.self_attn.k_proj.bias [16]",
            "missing model.norm.weight [32]",
            "model.layers.0.mlp.up_proj.weight is [3, 4] and should be [48, 32]",
            "unexpected model.layers.4.mlp.up_proj.weight F32 [2]",
        ):
            assert words in said[0]
        assert "model.norm.weight is I32 and should be one of BF16, F16, F32, F64" in said[1]
        assert "lm_head.weight differs from model.embed_tokens.weight" in said[2]
        assert "there is neither model.safetensors nor model.safetensors.index.json" in said[3]
        assert "weights cannot be read" in said[4]
        assert "gone.safetensors" in said[5]
        assert all("is not an index" in each for each in (said[6], said[8]))
        assert "model.norm.weight is in one.safetensors and in two.safetensors" in said[7]


def test_a_tied_output_layer_may_be_stored_twice(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    with changed(tiny_model, tmp_path / "twice") as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    config = jobs.make_config(tiny_model)
    assert ranks.run(refusals, 1, config=config, folders=[str(tmp_path / "twice")]) == [([""], True)]


def export_twice(start: jobs.Start, config: Config, export: str) -> list[str]:
    rank = start(config)
    said = []
    for _ in range(2):
        try:
            rank.export_hf(export)
        except MegagentError as error:
            said.append(str(error))
    return said


def test_an_export_replaces_only_leftovers_of_its_own(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    out, leftover = tmp_path / "out", tmp_path / ".out.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    said = ranks.run(export_twice, 2, config=jobs.make_config(tiny_model, tp=2), export=str(out))
    assert not leftover.exists()
    assert said == [[f"{out} exists already; choose another folder for the model or remove it"]] * 2
    assert load_file(out / "model.safetensors")
