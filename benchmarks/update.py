"""One whole update of the trainer against the same update in plain transformers, and tensor parallelism on two cores.

An update is what an iteration does with its rows: log-probs of the actor, advantages, PPO in mini-batches with entropy
and KL, gradient clipping, AdamW. Plain transformers does the same arithmetic on the same weights, rows and
micro-batches (right-padded, sorted by length), with the logits of all positions, as most trainers have them; the
losses of both are compared. All processes are alive from the start and take turns, so that whatever else the machine
does falls on all of them. One thread against one thread is compared by CPU seconds, which are those of the clock on an
idle machine, and which a busy one hardly changes; tensor parallelism by the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.report import arguments, close

TIMEOUT_S = 900.0
# A small agent: what two cores train. layers, hidden, ffn, heads, kv heads, vocabulary.
SHAPE = (6, 256, 768, 8, 2, 4096)
QUICK_SHAPE = (2, 64, 128, 4, 2, 500)
ROWS, MICRO_BATCH_ROWS, LOG_PROB_ROWS = 16, 4, 8


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="timed updates of every way")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with TemporaryDirectory() as folder:
        write_model(Path(folder), QUICK_SHAPE if options.quick else SHAPE)
        ways = {
            "plain, 1 thread": Way(plain_worker, [(folder, 1)]),
            "megatron, 1 thread": Way(megatron_worker, [(folder, 1, 1, 0, 0)]),
            "megatron, 2 threads": Way(megatron_worker, [(folder, 2, 1, 0, 0)]),
            "megatron, tp 2": Way(megatron_worker, [(folder, 1, 2, rank, _free_port()) for rank in (0, 1)], share=True),
        }
        try:
            return compare(options, ways, rounds)
        finally:
            for way in ways.values():
                way.close()


def compare(options: argparse.Namespace, ways: dict[str, Way], rounds: int) -> int:
    losses = {name: way.turn().loss for name, way in ways.items()}  # also warms up
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            turns[name].append(way.turn())
    clock = {name: min(turn.seconds for turn in each) for name, each in turns.items()}
    cpu = {name: statistics.median(turn.cpu_seconds for turn in each) for name, each in turns.items()}
    of_plain = cpu["plain, 1 thread"] / cpu["megatron, 1 thread"]
    of_threads = clock["megatron, 2 threads"] / clock["megatron, tp 2"]
    alike = all(abs(loss - losses["plain, 1 thread"]) < 1e-4 * max(1.0, abs(loss)) for loss in losses.values())
    if not options.json:
        for name, value in clock.items():
            print(f"  {name:20s} {value:7.3f} s an update, {cpu[name]:7.3f} s of CPU   loss {losses[name]:.6f}")
        print(f"  one rank is {of_plain:.2f} times as fast as plain transformers; TP2 {of_threads:.2f} of two threads")
    figures = {f"{name}: seconds": value for name, value in clock.items()}
    figures |= {f"{name}: cpu seconds": value for name, value in cpu.items()}
    figures |= {"of_plain_transformers": of_plain, "tp2_of_two_threads": of_threads, "rounds": rounds}
    bars = {"same losses": alike}
    if not options.quick:
        bars |= {"at least as fast as plain": of_plain >= 1.0, "tp2 at least 0.75 of two threads": of_threads >= 0.75}
    return close("update", figures, bars)


class Turn(NamedTuple):
    """What an update took, by the clock and of the process' CPU time, and its loss."""

    seconds: float
    cpu_seconds: float
    loss: float

    @classmethod
    def of(cls, update: Callable[[], float]) -> Turn:
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = update()
        return cls(time.perf_counter() - start, time.process_time() - cpu_start, loss)


class Way:
    """Processes that make an update each time they are told to. share: those of one way work together."""

    def __init__(self, worker: Callable[..., None], arguments: list[tuple[Any, ...]], share: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        if share:
            arguments = [(*each[:-1], arguments[0][-1]) for each in arguments]  # one port for all
        self.pipes: list[Connection] = []
        self.processes = []
        for each in arguments:
            mine, theirs = context.Pipe()
            process = context.Process(target=worker, args=(theirs, *each), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def turn(self) -> Turn:
        """One update: the slowest process' time."""
        for pipe in self.pipes:
            pipe.send(True)
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(TIMEOUT_S):
                raise SystemExit(f"an update did not end within {TIMEOUT_S:.0f} s")
            answers.append(pipe.recv())
        return max(answers)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):  # it has died
                pipe.send(False)
            process.join(30)
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_model(folder: Path, shape: tuple[int, ...]) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    layers, hidden, ffn, heads, kv_heads, vocab = shape
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            initializer_range=0.05,
        )
    )
    model.float().save_pretrained(folder)


def configuration(folder: str) -> Any:
    from megagent.config import Config

    config = Config()
    config.model.path, config.model.dtype = folder, "fp32"
    config.cluster.platform, config.cluster.timeout_s = "cpu", TIMEOUT_S
    trainer = config.trainer
    trainer.mini_batch_rows, trainer.micro_batch_rows, trainer.log_prob_micro_batch_rows = (
        ROWS,
        MICRO_BATCH_ROWS,
        LOG_PROB_ROWS,
    )
    trainer.lr = 1e-5
    return config


def make_rows(vocab: int) -> Any:
    """Steps of two tasks, eight episodes each, as long as the shop's: prompts of 150 to 400 tokens, responses of 12 to
    48, with the columns that advantages need."""
    import torch

    from megagent.batch import Jagged, StepBatch, objects

    generator = torch.Generator().manual_seed(0)

    def tokens(low: int, high: int) -> Jagged:
        lengths = torch.randint(low, high + 1, (ROWS,), generator=generator)
        return Jagged(torch.randint(0, vocab, (int(lengths.sum()),), generator=generator), lengths)

    responses = tokens(12, 48)
    rewards = 10.0 * torch.randint(0, 2, (ROWS,), generator=generator).float()
    last = torch.zeros(responses.tokens)
    last[responses.offsets[1:] - 1] = rewards
    return StepBatch(
        {
            "uid": objects(f"task {row // 8}" for row in range(ROWS)),
            "traj_uid": objects(f"episode {row}" for row in range(ROWS)),
            "anchor_obs": objects(f"page {row % 3}" for row in range(ROWS)),
            "step_index": torch.zeros(ROWS, dtype=torch.int64),
            "rewards": rewards,
            "episode_rewards": rewards,
            "returns": rewards,
            "token_rewards": responses.like(last),
            "is_action_valid": torch.ones(ROWS, dtype=torch.bool),
            "is_padding": torch.zeros(ROWS, dtype=torch.bool),
            "prompts": tokens(150, 400),
            "responses": responses,
            "response_mask": responses.like(torch.ones(responses.tokens)),
        }
    )


# --- the trainer ------------------------------------------------------------------------------------------------------


def megatron_worker(pipe: Connection, folder: str, threads: int, tp: int, rank: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    from megagent.algos.advantages import estimate_advantages
    from megagent.parallel.rank import Rank

    config = configuration(folder)
    config.parallel.tp, config.cluster.threads = tp, threads
    here = Rank(config, rank, tp, "127.0.0.1", port or _free_port())
    here.setup()
    rows = make_rows(here.policy.stage.architecture.vocab)

    def update() -> float:
        answer = here.log_probs(rows, "actor")
        old = answer["log_probs"] if answer is not None else rows["responses"].to(torch.float32)
        if tp > 1:  # the driver would send it on from the speaking rank
            dist.broadcast(old.values, src=0, group=here.topology.tp_group)
        ready = estimate_advantages(rows.with_columns(old_log_probs=old, ref_log_probs=old), config.algo)
        metrics = here.update(ready)
        return metrics["actor/pg_loss"] - metrics["actor/entropy"]

    while pipe.recv():
        pipe.send(Turn.of(update))


# --- plain transformers -----------------------------------------------------------------------------------------------


def plain_worker(pipe: Connection, folder: str, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from megagent.algos.advantages import estimate_advantages
    from megagent.batch import Jagged

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    config = configuration(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer, algo = config.trainer, config.algo
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": trainer.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=trainer.lr,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        eps=1e-8,
    )
    rows = make_rows(model.config.vocab_size)
    lengths = rows["prompts"].lengths + rows["responses"].lengths
    order = torch.argsort(lengths, descending=True)

    def scores(part: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies of a micro-batch's response tokens, in the order of its rows."""
        pairs = [(rows["prompts"].row(int(row)), rows["responses"].row(int(row))) for row in part]
        sequences = [torch.cat(pair) for pair in pairs]
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        logits = model(input_ids=padded, attention_mask=_mask(lengths[part], padded.shape[1])).logits
        taken = torch.cat(
            [logits[i, len(prompt) - 1 : len(prompt) - 1 + len(reply)] for i, (prompt, reply) in enumerate(pairs)]
        )
        log_p = torch.log_softmax(taken, dim=-1)
        targets = torch.cat([reply for _, reply in pairs])
        entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
        return log_p.gather(1, targets[:, None])[:, 0], entropy

    def update() -> float:
        with torch.no_grad():
            parts = torch.split(order, trainer.log_prob_micro_batch_rows)
            both = [scores(part, True) for part in parts]
        old = Jagged(torch.cat([one for one, _ in both]), rows["responses"].lengths[order]).take(torch.argsort(order))
        ready = estimate_advantages(rows.with_columns(old_log_probs=old), algo)
        count = float(rows["response_mask"].values.sum())
        optimizer.zero_grad(set_to_none=True)
        policy_loss = entropies = 0.0
        for part in torch.split(order, trainer.micro_batch_rows):
            log_probs, entropy = scores(part, True)
            batch = ready.take(part)
            ratio = (log_probs - batch["old_log_probs"].values).exp()
            advantages = batch["advantages"].values
            pg = -torch.minimum(ratio * advantages, ratio.clamp(1 - algo.clip, 1 + algo.clip) * advantages).sum()
            difference = batch["old_log_probs"].values - log_probs
            kl = (difference.exp() - difference - 1).clamp(max=10).sum()
            ((pg - algo.entropy_coef * entropy.sum() + algo.kl_coef * kl) / count).backward()
            policy_loss += float(pg.detach()) / count
            entropies += float(entropy.detach().sum()) / count
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.clip_grad)
        optimizer.step()
        return policy_loss - entropies

    while pipe.recv():
        pipe.send(Turn.of(update))


def _mask(lengths: Any, width: int) -> Any:
    import torch

    return (torch.arange(width) < lengths[:, None]).to(torch.int64)


if __name__ == "__main__":
    sys.exit(main())
