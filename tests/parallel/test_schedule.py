"""Micro-batches: what the model is shown, and that values come back to their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megagent.batch import Jagged, StepBatch
from tests.parallel import jobs
from tests.parallel.pool import JobFailed, RankPool

pytestmark = pytest.mark.slow


def _two_rows() -> StepBatch:
    prompts = Jagged.from_list([torch.tensor([5, 6, 7]), torch.tensor([8])])
    responses = Jagged.from_list([torch.tensor([10, 11]), torch.tensor([12, 13])])
    return StepBatch(
        {
            "prompts": prompts,
            "responses": responses,
            "response_mask": responses.like(torch.tensor([1.0, 0.0, 1.0, 1.0])),
            "advantages": responses.like(torch.tensor([0.1, 0.2, 0.3, 0.4])),
        }
    )


def micro_batch_job(start: jobs.Start, rows: StepBatch, take: list[int], mask: str | None) -> dict[str, Any]:
    from megagent.parallel import schedule

    sequences = schedule.response_sequences(rows, ["advantages"], mask=mask)
    return vars(sequences.micro_batch(torch.tensor(take)))


def weighted_job(start: jobs.Start, rows: StepBatch) -> dict[str, Any]:
    from megagent.parallel import schedule

    return vars(schedule.weighted_sequences(rows).micro_batch(torch.arange(len(rows))))


def cut_job(start: jobs.Start, rows: StepBatch, micro_batch_rows: int) -> list[list[int]]:
    from megagent.parallel import schedule

    sequences = schedule.response_sequences(rows)
    return [part.tolist() for part in schedule.by_length(sequences, torch.arange(len(rows)), micro_batch_rows)]


def restored_job(start: jobs.Start, rows: StepBatch) -> torch.Tensor:
    from megagent.parallel import schedule
    from megagent.parallel.learner import restored

    sequences = schedule.response_sequences(rows)
    cut = schedule.by_length(sequences, torch.arange(len(rows)), 5)
    parts = [sequences.micro_batch(part).targets for part in cut]
    return restored(parts, cut, rows["responses"]).values


def test_rows_are_right_padded_and_each_response_token_is_predicted_by_the_one_before(ranks: RankPool) -> None:
    micro_batch = ranks.run(micro_batch_job, 1, rows=_two_rows(), take=[0, 1], mask=None)[0]
    assert micro_batch["tokens"].tolist() == [[5, 6, 7, 10, 11], [8, 12, 13, 0, 0]]
    assert micro_batch["targets"].tolist() == [10, 11, 12, 13]
    # position x rows + row: positions 2 and 3 of row 0, 0 and 1 of row 1
    assert micro_batch["selected"].tolist() == [2 * 2 + 0, 3 * 2 + 0, 0 * 2 + 1, 1 * 2 + 1]


def test_only_loss_tokens_are_predicted_in_an_update(ranks: RankPool) -> None:
    micro_batch = ranks.run(micro_batch_job, 1, rows=_two_rows(), take=[1, 0], mask="response_mask")[0]
    assert micro_batch["targets"].tolist() == [12, 13, 10]
    torch.testing.assert_close(micro_batch["columns"]["advantages"], torch.tensor([0.3, 0.4, 0.1]))


def test_rows_without_loss_tokens_predict_one_of_no_weight(ranks: RankPool) -> None:
    rows = _two_rows()
    rows = rows.with_columns(response_mask=rows["response_mask"].like(torch.zeros(4)))
    micro_batch = ranks.run(micro_batch_job, 1, rows=rows, take=[0, 1], mask="response_mask")[0]
    assert micro_batch["targets"].tolist() == [6]
    assert micro_batch["columns"]["advantages"].tolist() == [0.0]


def test_supervised_weights_never_fall_on_the_first_token(ranks: RankPool) -> None:
    rows = _two_rows()
    weights = Jagged(torch.tensor([0.1, 0.1, 0.0, 1.0, 1.0, 0.1, 1.0, 0.0]), torch.tensor([5, 3]))
    micro_batch = ranks.run(weighted_job, 1, rows=rows.with_columns(loss_weights=weights))[0]
    assert micro_batch["targets"].tolist() == [6, 10, 11, 12]
    torch.testing.assert_close(micro_batch["columns"]["loss_weights"], torch.tensor([0.1, 1.0, 1.0, 1.0]))


def test_micro_batches_hold_every_row_once_longest_first(ranks: RankPool) -> None:
    rows = jobs.make_rows()
    cut = ranks.run(cut_job, 1, rows=rows, micro_batch_rows=5)[0]
    lengths = (rows["prompts"].lengths + rows["responses"].lengths).tolist()
    flat = [row for part in cut for row in part]
    assert sorted(flat) == list(range(12))
    assert [len(part) for part in cut] == [5, 5, 2]
    assert [lengths[row] for row in flat] == sorted(lengths, reverse=True)


def test_values_of_micro_batches_come_back_to_their_rows(ranks: RankPool) -> None:
    rows = jobs.make_rows()
    assert torch.equal(ranks.run(restored_job, 1, rows=rows)[0], rows["responses"].values.float())


def test_an_empty_prompt_is_refused(ranks: RankPool) -> None:
    rows = _two_rows().with_columns(prompts=Jagged.from_list([torch.tensor([5]), torch.tensor([], dtype=torch.int64)]))
    with pytest.raises(JobFailed, match="at least one prompt token"):
        ranks.run(cut_job, 1, rows=rows, micro_batch_rows=2)
