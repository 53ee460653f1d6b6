"""Every family on Megatron computes what transformers computes, however it is split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
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
        {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
        {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
        {"dp": 2, "pp": 2, "ep": 2},
    ],
}


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


def logits_job(
    start: jobs.Start, layouts: list[Layout], folders: list[list[Path]], dtype: str, rows: StepBatch
) -> list[tuple[int, Tensor] | None]:
    """For each layout, for each of its models: (replica, logits [response tokens of its rows, vocabulary]) on speaking
    ranks, None on the others. Of padded rows and of packed ones, after each other."""
    from megagent.model_source import hf_config_of
    from megagent.parallel import hf_io, model, models

    found = []
    for layout, its_folders in zip(layouts, folders, strict=True):
        config = jobs.laid_out(its_folders[0], layout)
        config.model.dtype = dtype
        topology = start(config).topology
        for folder in its_folders:
            stage = model.build(config, topology, models.architecture_of(hf_config_of(str(folder))))
            hf_io.load_hf(stage, folder)
            own = rows.split(topology.dp)[topology.dp_rank]
            found += [_logits(topology, stage, own), _packed_logits(topology, stage, own)]
    return found


def _packed_logits(topology: Any, stage: Any, rows: StepBatch) -> tuple[int, Tensor] | None:
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


def _logits(topology: Any, stage: Any, rows: StepBatch) -> tuple[int, Tensor] | None:
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


def spoken(results: list[tuple[int, Tensor] | None]) -> Tensor:
    parts = sorted((part for part in results if part is not None), key=lambda part: part[0])
    return torch.cat([logits for _, logits in parts]).float()


def transformers_logits(folder: Path, rows: StepBatch, dtype: torch.dtype = torch.float32) -> Tensor:
    model = families.load_model(folder, dtype).eval()
    found = []
    with torch.no_grad():
        for prompt, response in zip(rows["prompts"].rows(), rows["responses"].rows(), strict=True):
            found.append(model(torch.cat([prompt, response])[None]).logits[0, :-1])
    return torch.cat(found).float()


@pytest.fixture(scope="module")
def models_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: families.write_model(tmp_path_factory.mktemp(name), name) for name in families.FAMILIES}


def _logits_of_all(
    ranks: RankPool, models_of: dict[str, Path], layouts: list[Layout], dtype: str = "fp32"
) -> dict[tuple[int, str, str], Tensor]:
    """(number of the layout, family, padded or packed) -> logits [tokens, vocabulary] of all rows."""
    cases = [
        (number, name, rows)
        for number, layout in enumerate(layouts)
        for name in families_at(layout)
        for rows in ("padded", "packed")
    ]
    results = ranks.run(
        logits_job,
        jobs.ranks_of(layouts[0]),
        layouts=layouts,
        folders=[[models_of[name] for name in families_at(layout)] for layout in layouts],
        dtype=dtype,
        rows=token_rows(),
        starts=len(layouts),
    )
    return {case: spoken([result[place] for result in results]) for place, case in enumerate(cases)}


@pytest.fixture(scope="module")
def expected(models_of: dict[str, Path]) -> dict[str, Tensor]:
    return {name: transformers_logits(folder, token_rows()) for name, folder in models_of.items()}


@pytest.mark.parametrize("world", list(LAYOUTS))
def test_logits_are_those_of_transformers_in_every_family_and_layout(
    ranks: RankPool, models_of: dict[str, Path], expected: dict[str, Tensor], world: int
) -> None:
    for (number, name, laid), logits in _logits_of_all(ranks, models_of, LAYOUTS[world]).items():
        worst = (logits - expected[name]).abs().max() / expected[name].abs().max()
        assert worst < 1e-5, f"{name}, {laid}, at {LAYOUTS[world][number]}: {worst:.1e}"


def test_bf16_costs_megatron_no_more_than_it_costs_transformers(
    ranks: RankPool, models_of: dict[str, Path], expected: dict[str, Tensor]
) -> None:
    layout = {"tp": 2, "sequence_parallel": True}
    for (_, name, laid), logits in _logits_of_all(ranks, models_of, [layout], "bf16").items():
        theirs = transformers_logits(models_of[name], token_rows(), torch.bfloat16)
        error, their_error = (float((each - expected[name]).square().mean().sqrt()) for each in (logits, theirs))
        assert error < 1.5 * their_error, f"{name}, {laid}: {error:.1e} against {their_error:.1e}"
