"""Hugging Face folders in and out of Megatron ranks: transformers' logits, the same bytes back, clear errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megagent.config import Config
from megagent.errors import MegagentError
from tests.parallel import jobs
from tests.parallel.models.test_family import QWEN_1_5B, QWEN_7B
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow

# (tp, pp, dp); tp=4 is more ranks than the tied model has key/value heads.
TOPOLOGIES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2), (1, 4, 1)]
MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 16},
}
TOKENS = torch.randint(0, jobs.VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    jobs.write_tiny_model(path, **MODELS[request.param])
    (path / "tokenizer.json").write_text("{}")
    (path / "LICENSE").write_text("free")
    return path


def transformers_logits(folder: Path) -> Tensor:
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def logits_and_export(start: jobs.Start, config: Config, export: str, shard_bytes: int) -> Tensor | None:
    """A job: writes the model to a folder; the logits [rows, tokens, vocabulary] on the last stage, None elsewhere."""
    import torch.distributed as dist

    from megagent.parallel import hf_io

    rank = start(config)
    stage, topology = rank.policy.stage, rank.topology
    hf_io.export_hf(stage.wrapped, stage.family, stage.hf_config, export, config.model.path, shard_bytes)
    chunk = stage.chunks[0].eval()
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        if not topology.is_first_stage:
            hidden = torch.empty(TOKENS.shape[1], TOKENS.shape[0], stage.hf_config["hidden_size"])
            dist.recv(hidden, group=topology.pp_group, group_src=topology.pp_rank - 1)
            chunk.set_input_tensor(hidden)
        out = chunk(TOKENS, positions, None).contiguous()
        if not topology.is_last_stage:
            dist.send(out, group=topology.pp_group, group_dst=topology.pp_rank + 1)
            return None
        shards = [torch.empty_like(out) for _ in range(topology.tp)]
        dist.all_gather(shards, out, group=topology.tp_group)
    return torch.cat(shards, dim=-1)[..., : stage.vocab]


@pytest.mark.parametrize("sizes", TOPOLOGIES, ids=lambda sizes: "tp{}_pp{}_dp{}".format(*sizes))
def test_logits_equal_those_of_transformers_and_what_is_written_equals_what_was_read(
    ranks: RankPool, folder: Path, tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    tp, pp, dp = sizes
    config = jobs.make_config(folder, tp, pp, dp)
    out = tmp_path / "out"
    results = ranks.run(logits_and_export, tp * pp * dp, config=config, export=str(out), shard_bytes=1 << 30)
    expected = transformers_logits(folder)
    for logits in results:
        if logits is not None:
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    source, written = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert source.keys() == written.keys()
    assert all(torch.equal(source[name], written[name]) for name in source)
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}


def test_transformers_loads_a_sharded_export(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = jobs.make_config(folder, tp=2)
    ranks.run(logits_and_export, 2, config=config, export=str(out), shard_bytes=20_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert (
        sum(path.stat().st_size for path in out.glob("*.safetensors"))
        > (json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"])
    )
    torch.testing.assert_close(transformers_logits(out), transformers_logits(folder), atol=0, rtol=0)
    # What was written in several files is read from several files.
    again = tmp_path / "again"
    ranks.run(logits_and_export, 2, config=jobs.make_config(out, tp=2), export=str(again), shard_bytes=1 << 30)
    source, written = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(torch.equal(source[name], written[name]) for name in source)


def exported(start: jobs.Start, config: Config, export: str) -> None:
    from megagent.parallel import hf_io

    stage = start(config).policy.stage
    hf_io.export_hf(stage.chunks, stage.family, stage.hf_config, export, config.model.path)


def test_weights_are_cast_and_the_config_says_so(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    config = jobs.make_config(tiny_model, tp=2)
    config.model.dtype = "bf16"
    ranks.run(exported, 2, config=config, export=str(tmp_path / "out"))
    source, written = load_file(tiny_model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(source[name].bfloat16(), written[name]) for name in source)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def refusals(start: jobs.Start, config: Config, folders: list[str]) -> tuple[list[str], bool]:
    """A job: what loading each folder into a good model says, and whether the model is as it was."""
    from megagent.parallel import hf_io

    stage = start(config).policy.stage
    before = [parameter.detach().clone() for parameter in stage.parameters()]
    said = []
    for folder in folders:
        try:
            hf_io.load_hf(stage.chunks, stage.family, stage.hf_config, folder)
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
    bad = [tmp_path / name for name in ("many", "integers", "untied", "empty", "broken", "part", "index")]
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
    for broken, index in ((bad[5], {"weight_map": {"model.norm.weight": "gone.safetensors"}}), (bad[6], [])):
        broken.mkdir()
        (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    answers = ranks.run(refusals, 2, config=jobs.make_config(tiny_model, tp=2), folders=[str(path) for path in bad])
    for said, untouched in answers:
        assert untouched
        for words in (
            "missing model.layers.3.self_attn.k_proj.bias [16]",
            "missing model.norm.weight [32]",
            "model.layers.0.mlp.up_proj.weight is [3, 4] and should be [48, 32]",
            "unexpected model.layers.4.mlp.up_proj.weight [2]",
        ):
            assert words in said[0]
        assert "model.norm.weight is I32 and should be one of BF16, F16, F32, F64" in said[1]
        assert "lm_head.weight differs from model.embed_tokens.weight" in said[2]
        assert "there is neither model.safetensors nor model.safetensors.index.json" in said[3]
        assert "weights cannot be read" in said[4]
        assert "gone.safetensors" in said[5]
        assert "is not an index" in said[6]


def test_a_tied_output_layer_may_be_stored_twice(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    with changed(tiny_model, tmp_path / "twice") as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    config = jobs.make_config(tiny_model)
    assert ranks.run(refusals, 1, config=config, folders=[str(tmp_path / "twice")]) == [([""], True)]


def export_twice(start: jobs.Start, config: Config, export: str) -> list[str]:
    from megagent.parallel import hf_io

    stage = start(config).policy.stage
    said = []
    for _ in range(2):
        try:
            hf_io.export_hf(stage.chunks, stage.family, stage.hf_config, export, config.model.path)
        except MegagentError as error:
            said.append(str(error))
    return said


def test_an_export_replaces_only_leftovers_of_its_own(ranks: RankPool, tiny_model: Path, tmp_path: Path) -> None:
    out, leftover = tmp_path / "out", tmp_path / ".out.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    said = ranks.run(export_twice, 1, config=jobs.make_config(tiny_model), export=str(out))[0]
    assert not leftover.exists()
    assert said == [f"{out} exists already; choose another folder for the model or remove it"]
    assert load_file(out / "model.safetensors")


def real_names(start: jobs.Start, hf_config: dict[str, Any], tp: int, pp: int) -> list[list[str]]:
    """A job: builds the stages of all ranks of a real model one after another, without weights; names on each stage."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megagent.parallel import hf_io, model, models

    del start
    family = models.family_of(hf_config)
    names = []
    for rank in range(tp * pp):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp * pp)
        try:
            parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
            tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
            config = TransformerConfig(
                **family.transformer_kwargs(hf_config),
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                pipeline_dtype=torch.bfloat16,
                params_dtype=torch.bfloat16,
                perform_initialization=False,
                use_cpu_initialization=True,  # with this set Megatron leaves the device to torch
            )
            with torch.device("meta"):
                chunk = GPTModel(
                    config=config,
                    transformer_layer_spec=model.layer_spec(config),
                    **family.gpt_kwargs(hf_config, tp),
                    pre_process=rank < tp,
                    post_process=rank >= tp * (pp - 1),
                )
            # Raises if any name or shape differs from the table.
            parameters = hf_io.named_parameters([chunk], family, hf_config)
            assert all(parameter.is_meta for parameter in parameters.values())
            if rank % tp == 0:
                names.append(list(parameters))
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return names


@pytest.mark.parametrize(
    ("hf_config", "tp", "pp"),
    [(QWEN_1_5B, 2, 1), (QWEN_1_5B, 4, 2), (QWEN_7B, 4, 2), (QWEN_7B, 1, 4)],
    ids=["1.5b-tp2", "1.5b-tp4-pp2", "7b-tp4-pp2", "7b-pp4"],
)
def test_every_rank_of_the_real_models_has_the_names_and_shapes_of_the_table(
    ranks: RankPool, hf_config: dict[str, Any], tp: int, pp: int
) -> None:
    names = ranks.run(real_names, 1, hf_config=hf_config, tp=tp, pp=pp)[0]
    tied_copies = 1 if hf_config["tie_word_embeddings"] and pp > 1 else 0
    tensors_of_a_layer, others = 7, 2 if hf_config["tie_word_embeddings"] else 3
    assert sum(map(len, names)) == tensors_of_a_layer * hf_config["num_hidden_layers"] + others + tied_copies
