"""However it is split, every family on Megatron computes what transformers computes, and gives its weights back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megagent.batch import Jagged, StepBatch
from tests.parallel import families, jobs
from tests.parallel.jobs import Layout
from tests.parallel.pool import RankPool

pytestmark = pytest.mark.slow

# Number of ranks -> layouts. Experts on several tensor ranks ask for sequence parallelism.
LAYOUTS: dict[int, list[Layout]] = {
    1: [{}],
    2: [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2},
        {"pp": 2, "vpp": 2},
        {"dp": 2, "ep": 2},
        {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1},
    ],
    4: [
        {"tp": 4},
        {"tp": 4, "sequence_parallel": True},
        {"pp": 4},
        {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
        {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
        {"dp": 2, "pp": 2, "ep": 2},
    ],
}
BF16_LAYOUTS: dict[int, list[Layout]] = {
    1: [{}],
    4: [{"tp": 4, "sequence_parallel": True}, {"tp": 2, "pp": 2, "sequence_parallel": True}],
}
# Number of ranks -> whether its models are tied. Their sizes are drawn anew for each.
TIED = {1: False, 2: False, 4: True}


Spoken = tuple[int, Tensor] | None


def families_at(layout: Layout) -> tuple[str, ...]:
    if "ep" in layout:
        return families.MIXTURES
    fits_experts = layout.get("tp", 1) == 1 or "sequence_parallel" in layout
    return tuple(name for name in families.FAMILIES if fits_experts or name not in families.MIXTURES)


def token_rows() -> StepBatch:
    """Rows of different lengths, the longest long enough for scaled rotary frequencies to show."""
    generator = torch.Generator().manual_seed(5)
    lengths = [60, 1, 7, 20, 33, 2, 12, 5]
    responses = Jagged.from_list([torch.randint(0, families.VOCAB, (n,), generator=generator) for n in lengths])
    prompts = Jagged.from_list([torch.randint(0, families.VOCAB, (1,), generator=generator) for _ in lengths])
    return StepBatch({"prompts": prompts, "responses": responses})


@dataclass(frozen=True)
class Order:
    """One model at one layout. export: where its weights go once they are Megatron's."""

    layout: Layout
    model: Path
    export: Path


def logits_job(start: jobs.Start, orders: list[list[Order]], dtype: str, rows: StepBatch) -> list[Spoken]:
    """For each layout, for each of its models: the logits of padded rows and of packed ones, after each other.

    Spoken: (replica, logits [response tokens of its rows, vocabulary]) on speaking ranks, None on the others.
    """
    from megagent.model_source import hf_config_of
    from megagent.parallel import hf_io, model, models

    found = []
    for group in orders:
        config = jobs.laid_out(group[0].model, group[0].layout)
        config.model.dtype = dtype
        topology = start(config).topology
        for order in group:
            hf_config = hf_config_of(str(order.model))
            stage = model.build(config, topology, models.architecture_of(hf_config))
            hf_io.load_hf(stage, order.model)
            own = rows.split(topology.dp)[topology.dp_rank]
            found += [_logits(topology, stage, own), _packed_logits(topology, stage, own)]
            hf_io.export_hf(stage, order.export, hf_config, order.model)
    return found


def _packed_logits(topology: Any, stage: Any, rows: StepBatch) -> Spoken:
    """Through the package's own schedule, two rows end to end in each micro-batch."""
    import torch.distributed as dist

    from megagent.parallel import schedule

    def gathered(_: Any, answer: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        shards = [torch.empty_like(answer) for _ in range(stage.degrees.tp)]
        dist.all_gather(shards, answer.contiguous(), group=topology.tp_group)
        return answer.sum(), {"logits": torch.cat(shards, dim=-1)[:, : stage.architecture.vocab]}

    cut = list(torch.split(torch.arange(len(rows)), 2))
    cut += [torch.arange(0)] * (-len(cut) % stage.micro_batch_multiple)
    sequences = schedule.response_sequences(rows)
    results = schedule.run(replace(stage, packs=True), sequences, cut, gathered, forward_only=True)
    if not topology.speaks:
        return None
    logits = [result["logits"] for result, part in zip(results, cut, strict=True) if len(part)]
    return topology.dp_rank, torch.cat(logits)


def _logits(topology: Any, stage: Any, rows: StepBatch) -> Spoken:
    """Through Megatron's own schedule, with all logits of right-padded rows."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens = [torch.cat(pair) for pair in zip(rows["prompts"].rows(), rows["responses"].rows(), strict=True)]
    pairs = list(zip(tokens[::2], tokens[1::2], strict=True))
    pairs += pairs[-1:] * (-len(pairs) % stage.micro_batch_multiple)

    def forward_step(data: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        padded = nn.utils.rnn.pad_sequence(list(next(data)), batch_first=True)
        padded = nn.functional.pad(padded, (0, -padded.shape[1] % stage.length_multiple))
        return model(padded, torch.arange(padded.shape[1]).expand_as(padded), None), gathered

    def gathered(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        shards = [torch.empty_like(output) for _ in range(stage.degrees.tp)]
        dist.all_gather(shards, output.contiguous(), group=topology.tp_group)
        logits = torch.cat(shards, dim=-1)[..., : stage.architecture.vocab]
        return output.sum(), torch.zeros((), dtype=torch.int), {"logits": logits}

    data = [iter(pairs) for _ in stage.wrapped]
    with torch.no_grad():
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=stage.wrapped if len(data) > 1 else stage.wrapped[0],
            num_microbatches=len(pairs),
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
        )
    if not topology.speaks:
        return None
    by_row = [row for result in results for row in result["logits"]]
    return topology.dp_rank, torch.cat([logits[: len(row) - 1] for logits, row in zip(by_row, tokens, strict=False)])


def spoken(results: list[Spoken]) -> Tensor:
    parts = sorted((part for part in results if part is not None), key=lambda part: part[0])
    return torch.cat([logits for _, logits in parts]).float()


def transformers_logits(folder: Path, rows: StepBatch, dtype: torch.dtype = torch.float32) -> Tensor:
    model = families.load_model(folder, dtype)
    found = []
    with torch.no_grad():
        for prompt, response in zip(rows["prompts"].rows(), rows["responses"].rows(), strict=True):
            found.append(model(torch.cat([prompt, response])[None]).logits[0, :-1])
    return torch.cat(found).float()


@pytest.fixture(scope="module")
def models_of(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Path]]:
    """Number of ranks -> family -> a model."""
    return {
        world: {
            name: families.write_model(tmp_path_factory.mktemp(name), name, seed=world, tie_word_embeddings=tied)
            for name in families.FAMILIES
        }
        for world, tied in TIED.items()
    }


@pytest.fixture(scope="module")
def expected(models_of: dict[int, dict[str, Path]]) -> dict[Path, Tensor]:
    """Logits of every model in transformers."""
    return {folder: transformers_logits(folder, token_rows()) for of in models_of.values() for folder in of.values()}


@dataclass(frozen=True)
class Answer:
    """What became of an order. logits: of padded and of packed rows."""

    order: Order
    logits: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.order.model.name} at {self.order.layout}"


def carried_out(ranks: RankPool, layouts: list[Layout], models: dict[str, Path], out: Path, dtype: str) -> list[Answer]:
    """Every family's logits at every layout that can hold it, and what is exported from there."""
    orders = [
        [Order(layout, models[name], out / f"{number}-{name}") for name in families_at(layout)]
        for number, layout in enumerate(layouts)
    ]
    world = jobs.ranks_of(layouts[0])
    results = ranks.run(
        logits_job, world, seconds=600, orders=orders, dtype=dtype, rows=token_rows(), starts=len(layouts)
    )
    logits = iter([spoken(list(each)) for each in zip(*results, strict=True)])
    return [Answer(order, {"padded": next(logits), "packed": next(logits)}) for group in orders for order in group]


@pytest.fixture(scope="module", params=LAYOUTS)
def answers(
    request: pytest.FixtureRequest,
    ranks: RankPool,
    models_of: dict[int, dict[str, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Answer]:
    world = request.param
    return carried_out(ranks, LAYOUTS[world], models_of[world], tmp_path_factory.mktemp("exports"), "fp32")


def test_logits_are_those_of_transformers_in_every_family_and_layout(
    answers: list[Answer], expected: dict[Path, Tensor]
) -> None:
    for answer in answers:
        theirs = expected[answer.order.model]
        for rows, logits in answer.logits.items():
            worst = (logits - theirs).abs().max() / theirs.abs().max()
            assert worst < 1e-5, f"{answer}, {rows}: {worst:.1e}"


def test_weights_come_back_bit_for_bit_in_every_family_and_layout(answers: list[Answer]) -> None:
    for answer in answers:
        before, after = (load_file(each / "model.safetensors") for each in (answer.order.model, answer.order.export))
        assert before.keys() == after.keys(), str(answer)
        assert [name for name in before if not torch.equal(before[name], after[name])] == [], str(answer)


def test_what_is_exported_is_the_same_model_to_transformers(
    answers: list[Answer], expected: dict[Path, Tensor]
) -> None:
    last = {answer.order.model: answer for answer in answers}
    assert len(last) == len(families.FAMILIES)
    for model, answer in last.items():
        torch.testing.assert_close(
            transformers_logits(answer.order.export, token_rows()), expected[model], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("world", BF16_LAYOUTS)
def test_bf16_costs_megatron_at_most_twice_what_it_costs_transformers(
    ranks: RankPool,
    models_of: dict[int, dict[str, Path]],
    expected: dict[Path, Tensor],
    tmp_path: Path,
    world: int,
) -> None:
    """The distance from the logits in fp32, root mean square: at most twice that of transformers in bf16."""
    theirs = {model: transformers_logits(model, token_rows(), torch.bfloat16) for model in models_of[world].values()}
    for answer in carried_out(ranks, BF16_LAYOUTS[world], models_of[world], tmp_path, "bf16"):
        exact = expected[answer.order.model]
        for rows, logits in answer.logits.items():
            error, their_error = (
                float((each - exact).square().mean().sqrt()) for each in (logits, theirs[answer.order.model])
            )
            assert error < 2 * their_error, f"{answer}, {rows}: {error:.1e} against {their_error:.1e}"
