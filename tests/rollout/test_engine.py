"""The engine against transformers: real vLLM processes, a tiny random model with and without tied embeddings."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")
from transformers import Qwen2Config, Qwen2ForCausalLM

from megagent.config import Config
from megagent.errors import ConfigError, InfrastructureError, MegagentError
from megagent.rollout.engine import Generation, Sampling, VllmEngine

pytestmark = pytest.mark.slow
T = TypeVar("T")
VOCABULARY = 96
END = 0
START_TIMEOUT_S = 240.0  # generous: the machine may be busy with other tests
PROMPT = list(range(7, 47))
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def make_model(folder: Path, tied: bool, seed: int) -> Qwen2ForCausalLM:
    """Writes a random Qwen2 folder; the biases are random too, as those of trained weights are not zero."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,  # heads of 32: the CPU attention of vLLM knows none of 16
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=END,
        bos_token_id=None,
        max_position_embeddings=512,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def make_config(tp: int = 1) -> Config:
    config = Config()
    config.model.dtype = "fp32"
    config.rollout.tp, config.rollout.sync = tp, "gather"
    config.rollout.max_prompt_tokens = 200
    config.rollout.max_response_tokens = 24
    return config


def publish(model: Qwen2ForCausalLM, folder: Path, version: int) -> Path:
    """The file that a trainer would publish: transformers' own names, each shared tensor once."""
    source, target = folder / f"weights-{version}", folder / f"{version}.safetensors"
    model.save_pretrained(source)
    save_file(load_file(source / "model.safetensors"), target, metadata={"version": str(version)})
    return target


def reference_log_probs(model: Qwen2ForCausalLM, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probability of every response token by teacher forcing; [tokens]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]  # [tokens, vocabulary]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def assert_same_policy(model: Qwen2ForCausalLM, prompt: list[int], generation: Generation) -> None:
    expected = reference_log_probs(model, prompt, generation.token_ids)
    torch.testing.assert_close(torch.tensor(generation.log_probs), expected, atol=1e-4, rtol=0)


class Running:
    """An engine and the event loop that it lives on."""

    def __init__(self, folder: Path, tp: int, tied: bool) -> None:
        self.folder = folder
        self.tied = tied
        self.model = make_model(folder / "model", tied, seed=1)
        self.loop = asyncio.new_event_loop()
        self.engine = VllmEngine(make_config(tp), folder / "model", timeout_s=START_TIMEOUT_S)
        self.run(self.engine.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def generate(self, prompt: list[int], sampling: Sampling) -> Generation:
        return self.run(self.engine.generate(prompt, sampling))

    def sync(self, seed: int) -> None:
        """New random weights in the engine, and in `model`."""
        version = (self.engine.version or 0) + 1
        self.model = make_model(self.folder / "next", self.tied, seed)
        self.run(self.engine.receive_weights(publish(self.model, self.folder, version), version))

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.close()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("tied"), tp=1, tied=True)
    yield running
    running.close()


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("untied"), tp=2, tied=False)
    yield running
    running.close()


def test_log_probs_equal_those_of_transformers(tied: Running) -> None:
    assert_same_policy(tied.model, PROMPT, tied.generate(PROMPT, GREEDY))


def test_greedy_takes_the_likeliest_token(tied: Running) -> None:
    response = tied.generate(PROMPT, GREEDY).token_ids
    with torch.no_grad():
        logits = tied.model(torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == response


def test_log_probs_are_those_after_temperature(tied: Running) -> None:
    generation = tied.generate(PROMPT, Sampling(temperature=2.0, max_tokens=1, seed=5))
    with torch.no_grad():
        logits = tied.model(torch.tensor([PROMPT])).logits[0, -1]
    expected = (logits / 2).log_softmax(-1)[generation.token_ids[0]]
    torch.testing.assert_close(torch.tensor(generation.log_probs[0]), expected, atol=1e-4, rtol=0)


def test_a_seed_fixes_the_response(tied: Running) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=11)
    assert tied.generate(PROMPT, sampling).token_ids == tied.generate(PROMPT, sampling).token_ids


def test_different_seeds_give_different_responses(tied: Running) -> None:
    responses = {tuple(tied.generate(PROMPT, Sampling(max_tokens=12, seed=seed)).token_ids) for seed in range(4)}
    assert len(responses) > 1


def test_a_stop_token_ends_the_response_and_belongs_to_it(tied: Running) -> None:
    free = tied.generate(PROMPT, GREEDY).token_ids
    generation = tied.generate(PROMPT, Sampling(temperature=0.0, max_tokens=12, stop=(free[2],)))
    assert generation.finish_reason == "stop"
    assert generation.token_ids == free[: free.index(free[2]) + 1]


def test_a_response_ends_at_its_limit(tied: Running) -> None:
    generation = tied.generate(PROMPT, Sampling(temperature=0.0, max_tokens=2))
    assert (len(generation.token_ids), generation.finish_reason) == (2, "length")


def test_many_long_seeded_prompts_at_once(tied: Running) -> None:
    """More prompt tokens than the engine takes in one step: vLLM 0.32 dies of a seeded prompt taken in parts."""
    prompts = [[1 + (row * 31 + token * 7) % (VOCABULARY - 1) for token in range(200)] for row in range(96)]

    async def all_of_them() -> list[Generation]:
        sampling = [Sampling(max_tokens=3, seed=row) for row in range(len(prompts))]
        return await asyncio.gather(*map(tied.engine.generate, prompts, sampling))

    for prompt, generation in zip(prompts[::16], tied.run(all_of_them())[::16], strict=True):
        assert_same_policy(tied.model, prompt, generation)


@pytest.mark.parametrize(
    ("prompt", "sampling", "rule"),
    [
        ([], Sampling(), "rollout.max_prompt_tokens"),
        ([1] * 201, Sampling(), "rollout.max_prompt_tokens=200"),
        ([1, VOCABULARY], Sampling(), "vocabulary"),
        ([1], Sampling(max_tokens=25), "rollout.max_response_tokens=24"),
        ([1], Sampling(temperature=-1.0), "temperature"),
    ],
)
def test_a_request_outside_the_limits_is_refused(
    tied: Running, prompt: list[int], sampling: Sampling, rule: str
) -> None:
    with pytest.raises(MegagentError, match=rule):
        tied.generate(prompt, sampling)


def test_new_weights_replace_tied_ones(tied: Running) -> None:
    """Without repack_tied_heads the output layer keeps the old embedding, and this fails."""
    tied.sync(seed=2)
    assert_same_policy(tied.model, PROMPT, tied.generate(PROMPT, GREEDY))


def test_cached_prefixes_of_old_weights_are_forgotten(tied: Running) -> None:
    prompt = [3] * 128  # whole cache blocks, so that a second request would reuse them
    tied.generate(prompt, GREEDY)
    tied.sync(seed=3)
    assert_same_policy(tied.model, prompt, tied.generate(prompt, GREEDY))


def test_a_response_says_the_version_of_its_weights(tied: Running) -> None:
    tied.sync(seed=4)
    assert tied.generate(PROMPT, GREEDY).version == tied.engine.version


def test_responses_around_a_sync_come_from_one_version_each(tied: Running) -> None:
    old = tied.model
    version = (tied.engine.version or 0) + 1
    new = make_model(tied.folder / "next", tied=True, seed=5)
    path = publish(new, tied.folder, version)

    async def race() -> list[Generation]:
        before = [asyncio.create_task(tied.engine.generate(PROMPT, GREEDY)) for _ in range(8)]
        await asyncio.sleep(0)
        update = asyncio.create_task(tied.engine.receive_weights(path, version))
        await asyncio.sleep(0.01)
        after = [asyncio.create_task(tied.engine.generate(PROMPT, GREEDY)) for _ in range(8)]
        await update
        return await asyncio.gather(*before, *after)

    generations = tied.run(race())
    tied.model = new
    assert generations[-1].version == version
    for generation in generations:
        assert_same_policy(new if generation.version == version else old, PROMPT, generation)


def test_a_stale_version_is_refused(tied: Running) -> None:
    tied.sync(seed=6)
    with pytest.raises(MegagentError, match="not newer"):
        tied.run(tied.engine.receive_weights(tied.folder / "any.safetensors", tied.engine.version or 0))


def test_a_second_update_at_once_is_refused(tied: Running) -> None:
    version = (tied.engine.version or 0) + 1
    path = publish(tied.model, tied.folder, version)

    async def twice() -> list[BaseException | int]:
        updates = (tied.engine.receive_weights(path, version), tied.engine.receive_weights(path, version))
        return await asyncio.gather(*updates, return_exceptions=True)

    first, second = tied.run(twice())
    assert first == version
    assert isinstance(second, MegagentError)
    assert "under way" in str(second)


def test_an_incomplete_file_changes_nothing(tied: Running) -> None:
    version = (tied.engine.version or 0) + 1
    path = publish(make_model(tied.folder / "next", tied=True, seed=7), tied.folder, version)
    tensors = load_file(path)
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.q_proj.bias"]
    save_file(tensors, path)
    with pytest.raises(MegagentError, match=r"missing \(2\): model.layers.1.self_attn.q_proj.bias, model.norm.weight"):
        tied.run(tied.engine.receive_weights(path, version))
    assert_same_policy(tied.model, PROMPT, tied.generate(PROMPT, GREEDY))


def test_tensor_parallel_ranks_receive_untied_weights(untied: Running) -> None:
    untied.sync(seed=8)
    assert_same_policy(untied.model, PROMPT, untied.generate(PROMPT, GREEDY))


def test_the_death_of_the_engine_ends_all_waits(untied: Running) -> None:
    """Comes last: it leaves the engine dead."""
    children = [psutil.Process(pid) for pid in untied.engine.processes]

    async def wait_and_kill() -> list[BaseException | Generation]:
        waits = [
            asyncio.create_task(untied.engine.generate([row + 1], Sampling(max_tokens=24, seed=row)))
            for row in range(64)
        ]
        await asyncio.sleep(0.02)
        os.kill(untied.engine.processes[0], signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), timeout=150)

    outcomes = untied.run(wait_and_kill())
    assert any(isinstance(outcome, InfrastructureError) for outcome in outcomes)
    assert all(isinstance(outcome, InfrastructureError | Generation) for outcome in outcomes)
    with pytest.raises(InfrastructureError, match="unusable"):
        untied.generate(PROMPT, GREEDY)
    assert gone(children, within_s=150)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        VllmEngine(make_config(), tmp_path)


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    """Whether all of them end in time; kills the rest."""
    deadline = time.monotonic() + within_s
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in alive:
        process.kill()
    return not alive


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ENGINE_PROGRAM = """
import asyncio, sys, time
from megagent.config import Config
from megagent.rollout.engine import VllmEngine

if __name__ == "__main__":
    config = Config()
    config.model.dtype, config.rollout.tp = "fp32", 1
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 200, 24
    engine = VllmEngine(config, sys.argv[1])
    asyncio.run(engine.start())
    print("started", *engine.processes, flush=True)
    time.sleep(600)
"""


def test_nothing_survives_a_killed_parent(tmp_path: Path) -> None:
    make_model(tmp_path / "model", tied=True, seed=1)
    program = tmp_path / "program.py"
    program.write_text(ENGINE_PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "model")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        started = next((line for line in parent.stdout if line.startswith("started")), "")
        children = [psutil.Process(int(pid)) for pid in started.split()[1:]]
        parent.kill()
    assert children
    assert gone(children, within_s=150)
