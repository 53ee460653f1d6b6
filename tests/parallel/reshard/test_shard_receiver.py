"""A plain vLLM with this package's backend, and trainer ranks played by the test: what is received, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from transformers import Qwen2Config, Qwen2ForCausalLM

from megagent.errors import InfrastructureError, MegagentError
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import architecture_of
from megagent.parallel.reshard import checksum, shard_receiver, vllm
from megagent.parallel.reshard.apply import Incoming, InPlace, LiveTensor
from megagent.parallel.reshard.boxes import whole
from megagent.parallel.reshard.plan import BYTES, Copy
from megagent.parallel.reshard.shard_receiver import MIXED, ShardReceiver
from megagent.parallel.reshard.spec import Device, SyncPlan, SyncSpec, make_sync_plan
from megagent.parallel.reshard.transports import sender_end
from megagent.parallel.reshard.transports.base import Destination
from megagent.parallel.reshard.vllm import Workers

PROMPT = list(range(7, 40))
HERE = Device("here")
TERMS = SyncSpec(Degrees(tp=2, pp=2, dp=2), Workers(tp=2), "F32", "F32", (HERE,) * 8, (HERE,) * 2, buffer_bytes=9000)
SECONDS = 300.0
SLOW = pytest.mark.slow


class End:
    """Writes ones; what it was opened with, and whether it fails on the way."""

    def __init__(self) -> None:
        self.fails = False
        self.offers: Mapping[int, Any] = {}

    def open(self, offers: Mapping[int, Mapping[str, Any]], version: int) -> None:
        self.offers = offers

    def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
        for copy in copies:
            destination(copy).fill_(1.0)
        if self.fails:
            raise InfrastructureError("the trainer is gone")
        return 4

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def receiver() -> ShardReceiver:
    """A worker that has agreed on one round of one element, from an `End`."""
    config = SimpleNamespace(parallel_config=None, model_config=None)
    receiver = ShardReceiver(None, config, torch.device("cpu"), None)
    layer = torch.nn.LayerNorm(1)
    live = {"weight": LiveTensor(whole("weight", (1,), "F32"), layer, "weight", (), kept=True)}
    receiver._end, receiver._target = End(), InPlace(live)
    receiver._incoming = Incoming(((Copy(0, "weight", (0,), 0, "weight", (0,), (1,)),),), 0, live)
    return receiver


def update(receiver: ShardReceiver, version: int) -> None:
    receiver.start_weight_update()
    receiver.update_weights({"version": version, "offers": {"3": {"version": version}}})
    receiver.finish_weight_update()


def test_a_version_counts_once_its_update_has_been_ended(receiver: ShardReceiver) -> None:
    receiver.start_weight_update()
    receiver.update_weights({"version": 5, "offers": {}})
    assert receiver.version == MIXED
    receiver.finish_weight_update()
    assert receiver.version == receiver.report.version == 5


def test_offers_that_came_as_json_are_by_rank_again(receiver: ShardReceiver) -> None:
    update(receiver, 1)
    assert receiver._end.offers == {3: {"version": 1}}


def test_after_a_failure_on_the_way_no_version_is_claimed_until_a_whole_sync(receiver: ShardReceiver) -> None:
    update(receiver, 1)
    receiver._end.fails = True
    with pytest.raises(InfrastructureError, match="gone"):
        update(receiver, 2)
    assert receiver.version == MIXED
    with pytest.raises(MegagentError, match="no weights came"):
        receiver.finish_weight_update()
    receiver._end.fails = False
    update(receiver, 2)
    assert receiver.version == 2


def test_a_stale_version_is_refused_before_anything_is_written(receiver: ShardReceiver) -> None:
    update(receiver, 4)
    receiver._end.fails = True
    for stale in (3, 4):
        with pytest.raises(MegagentError, match=f"version {stale} are not newer than the engine's version 4"):
            update(receiver, stale)
    assert receiver.version == 4


def test_an_update_before_any_agreement_is_refused(receiver: ShardReceiver) -> None:
    receiver.shutdown()
    with pytest.raises(MegagentError, match="init_weight_transfer_engine first"):
        update(receiver, 1)


def make_model(folder: Path, seed: int) -> Qwen2ForCausalLM:
    """Tied, with biases and norms that are not the trivial ones."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=90,  # padded
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.normal_(mean=0.5, std=0.2)
    model.save_pretrained(folder)
    return model


class Trainer:
    """All ranks of a Megatron layout in this process, each offering its shards by shared memory."""

    def __init__(self, folder: Path, spec: SyncSpec) -> None:
        self.made: SyncPlan = make_sync_plan(spec, architecture_of(json.loads((folder / "config.json").read_text())))
        layout = self.made.plan.source
        self.shards = {
            rank: {tensor.name: torch.zeros(tensor.shape) for tensor in tensors}
            for rank, tensors in layout.tensors.items()
        }
        self.ends = {rank: sender_end("shared_memory", self.made, rank, self._read(rank)) for rank in layout.tensors}

    def _read(self, rank: int) -> dict[str, Tensor]:
        names = {copy.source for copy in self.made.plan.sends(rank)}
        return {name: tensor for name, tensor in self.shards[rank].items() if name in names}

    def load(self, model: Qwen2ForCausalLM) -> None:
        full = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for rank, tensors in self.made.plan.source.tensors.items():
            for tensor in tensors:
                for box in tensor.boxes:
                    self.shards[rank][tensor.name][box.local_slices] = full[box.hf][box.hf_slices]

    def offer(self, version: int) -> dict[int, dict[str, Any]]:
        return {rank: end.offer(version) for rank, end in self.ends.items()}

    def init_info(self) -> dict[str, Any]:
        spec = self.made.spec.as_json()
        return {"spec": spec, "engine": 0, "transport": "shared_memory", "digest": self.made.digest}

    def checksums(self) -> Mapping[int, Mapping[str, int]]:
        return checksum.merge(
            {copy.target_rank: {copy.target: checksum.copy_checksum(copy, self._part(copy))}}
            for copies in self.made.rounds
            for copy in copies
        )

    def _part(self, copy: Any) -> Tensor:
        return self.shards[copy.source_rank][copy.source][copy.source_slices]


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values))


class Engine:
    """vLLM's own `LLM`, told everything as JSON, as by its HTTP routes."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            tensor_parallel_size=2,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            block_size=32,
            enable_prefix_caching=False,
            distributed_executor_backend="mp",
            disable_log_stats=True,
            weight_transfer_config={"backend": "megagent"},
            worker_extension_cls="megagent.parallel.reshard.receiver.WorkerCalls",
        )

    def init(self, info: Mapping[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": as_json(info)})

    def sync(self, version: int, offers: Mapping[int, Any], checksums: bool = False) -> list[dict[str, Any]]:
        self.llm.start_weight_update()
        update = {"version": version, "offers": offers, "checksums": checksums}
        self.llm.update_weights({"update_info": as_json(update)})
        self.llm.finish_weight_update(weight_version=str(version))
        return self.call("weight_report")

    def call(self, name: str) -> list[Any]:
        return self.llm.collective_rpc(name, timeout=SECONDS)

    def log_probs(self) -> tuple[list[int], Tensor]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
        [answer] = self.llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        tokens = list(answer.outputs[0].token_ids)
        found = [entry[token].logprob for token, entry in zip(tokens, answer.outputs[0].logprobs, strict=True)]
        return tokens, torch.tensor(found)


def assert_computes_with(engine: Engine, model: Qwen2ForCausalLM) -> None:
    tokens, log_probs = engine.log_probs()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("receiver")
    make_model(folder / "model", seed=1)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    settings = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "MEGAGENT_ENGINE_OWNER": str(os.getpid()),
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings.items():
            environment.setenv(name, value)
        engine = Engine(folder / "model")
        yield engine
        engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Trainer:
    return Trainer(folder / "model", TERMS)


@pytest.fixture
def agreeing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ShardReceiver:
    """Worker 1 of 2, whose model is what the terms make of it, before it has been told of them."""
    group = SimpleNamespace(rank_in_group=1)
    monkeypatch.setattr(shard_receiver, "get_tp_group", lambda: group)
    monkeypatch.setattr(shard_receiver, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    config = json.loads((folder / "model" / "config.json").read_text())
    tensors = vllm.layout(architecture_of(config), TERMS.workers, "F32").tensors[1]
    layer = torch.nn.Identity()
    found = {tensor.name: LiveTensor(tensor, layer, "weight", (), kept=True) for tensor in tensors}
    monkeypatch.setattr(shard_receiver.live, "describe", lambda model: found)
    parallel = SimpleNamespace(
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
        data_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    model = SimpleNamespace(model=str(folder / "model"))
    return ShardReceiver(None, SimpleNamespace(parallel_config=parallel, model_config=model), torch.device("cpu"), None)


def init(receiver: ShardReceiver, info: Mapping[str, Any]) -> None:
    receiver.init_transfer_engine(receiver.parse_init_info(dict(info)))


def test_terms_that_fit_are_agreed_on(agreeing: ShardReceiver, folder: Path) -> None:
    trainer = Trainer(folder / "model", TERMS)
    init(agreeing, trainer.init_info())
    agreeing._end.open(trainer.offer(1), 1)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"digest": "0" * 64}, "plans the weight sync otherwise"),
        ({"engine": 1}, "engine 1 of 1"),
        (
            {"spec": replace(TERMS, workers=Workers(tp=1), targets=(HERE,)).as_json()},
            r"\(2, 1, False\), and the .* \(1, 1",
        ),
        ({"transport": "pigeon"}, "no such transport"),
        ({"spec": {"degrees": {}}}, "cannot be read .*SyncSpec.as_json"),
    ],
)
def test_terms_that_are_not_the_engines_are_refused(
    agreeing: ShardReceiver, trainer: Trainer, change: dict[str, Any], fault: str
) -> None:
    with pytest.raises(MegagentError, match=fault):
        init(agreeing, {**trainer.init_info(), **change})


def test_a_dtype_that_the_model_has_not_is_refused_by_name(agreeing: ShardReceiver, folder: Path) -> None:
    half = Trainer(folder / "model", replace(TERMS, target_dtype="BF16"))
    with pytest.raises(MegagentError, match=r"model\.embed_tokens\.weight is F32 in the model, BF16 in the plan"):
        init(agreeing, half.init_info())


def test_an_engine_of_several_replicas_is_refused(agreeing: ShardReceiver, trainer: Trainer) -> None:
    agreeing.parallel_config.data_parallel_size = 2
    with pytest.raises(MegagentError, match="data_parallel_size=2"):
        init(agreeing, trainer.init_info())


@SLOW
@pytest.mark.timeout(900)
def test_the_engine_computes_with_the_trainers_weights_after_each_sync(
    engine: Engine, trainer: Trainer, folder: Path
) -> None:
    engine.init(trainer.init_info())
    for version in (1, 2):
        model = make_model(folder / "next", seed=10 + version)
        trainer.load(model)
        reports = engine.sync(version, trainer.offer(version), checksums=True)
        assert [report["version"] for report in reports] == engine.call("weight_version") == [version] * 2
        for worker, report in enumerate(reports):
            held = trainer.made.plan.target.tensors[worker]
            parts = [torch.Size(box.shape).numel() * BYTES[tensor.dtype] for tensor in held for box in tensor.boxes]
            assert report["bytes"] == sum(parts)
        received = {worker: report["checksums"] for worker, report in enumerate(reports)}
        assert checksum.differences(trainer.checksums(), received) == []
        assert_computes_with(engine, model)
