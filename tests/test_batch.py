"""Rows move with all their columns, or not at all."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megagent.batch import Jagged, StepBatch, objects
from megagent.errors import BatchError

settings.register_profile("fast", max_examples=40, deadline=None)
settings.load_profile("fast")

lengths_lists = st.lists(st.integers(0, 6), max_size=12)


def jagged_of(lengths: list[int]) -> Jagged:
    """Every token is different, so a misplaced one shows."""
    return Jagged(torch.arange(sum(lengths)), torch.tensor(lengths, dtype=torch.int64))


def marked_batch(lengths: list[int]) -> StepBatch:
    """Row i says i in each of its columns."""
    rows = len(lengths)
    responses = Jagged.from_list([torch.full((n,), i) for i, n in enumerate(lengths)], dtype=torch.int64)
    return StepBatch(
        {
            "uid": objects(f"row {i}" for i in range(rows)),
            "step_index": torch.arange(rows),
            "image": torch.arange(rows).reshape(rows, 1, 1).expand(rows, 2, 3).clone(),
            "responses": responses,
            "old_log_probs": responses.to(torch.float32),
        }
    )


def marks(batch: StepBatch) -> list[int]:
    """The number that each row carries, once all its columns are seen to agree on it."""
    out = []
    for i in range(len(batch)):
        mark = int(batch["step_index"][i])
        assert batch["uid"][i] == f"row {mark}"
        for values in (batch["image"][i], batch["responses"].row(i), batch["old_log_probs"].row(i)):
            assert torch.all(values == mark)
        out.append(mark)
    return out


def same_rows(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@given(lengths_lists)
def test_rows_of_a_jagged_are_those_it_was_made_of(lengths: list[int]) -> None:
    rows = [torch.randint(0, 9, (n,)) for n in lengths]
    jagged = Jagged.from_list(rows)
    assert same_rows(jagged.rows(), rows)
    assert same_rows([jagged.row(i) for i in range(len(rows))], rows)


@given(lengths_lists, st.integers(0, 3))
def test_padding_and_unpadding_give_the_rows_back(lengths: list[int], extra: int) -> None:
    jagged = jagged_of(lengths)
    padded = jagged.padded(-1, length=max(lengths, default=0) + extra)
    assert int((padded == -1).sum()) == padded.numel() - jagged.tokens
    assert same_rows(Jagged.from_padded(padded, jagged.lengths).rows(), jagged.rows())


@given(st.data())
def test_take_gives_the_rows_asked_for(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=20))
    jagged = jagged_of(lengths)
    assert same_rows(jagged.take(chosen).rows(), [jagged.row(i) for i in chosen])


@given(lengths_lists)
def test_sums_and_spread_equal_a_loop_over_rows(lengths: list[int]) -> None:
    jagged = jagged_of(lengths)
    assert jagged.sums().tolist() == [int(row.sum()) for row in jagged.rows()]
    spread = jagged.spread(torch.arange(len(lengths)))
    assert same_rows(spread.rows(), [torch.full((n,), i) for i, n in enumerate(lengths)])


def test_lengths_that_do_not_sum_to_the_values_are_refused() -> None:
    with pytest.raises(BatchError, match="sum to 3 but there are 4 values"):
        Jagged(torch.zeros(4), torch.tensor([1, 2]))
    with pytest.raises(BatchError, match="must not be negative"):
        Jagged(torch.zeros(1), torch.tensor([2, -1]))


def test_padding_to_less_than_the_longest_row_is_refused() -> None:
    with pytest.raises(BatchError, match="rows of 3 tokens do not fit into 2"):
        jagged_of([1, 3]).padded(0, length=2)


@given(st.data())
def test_take_moves_all_columns_together(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=10))
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=15))
    assert marks(marked_batch(lengths).take(chosen)) == chosen


@given(st.data())
def test_a_mask_takes_the_rows_where_it_is_true(data: st.DataObject) -> None:
    lengths = data.draw(lengths_lists)
    mask = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    expected = [i for i, chosen in enumerate(mask) if chosen]
    assert marks(marked_batch(lengths).take(torch.tensor(mask, dtype=torch.bool))) == expected


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(1, 4))
def test_split_and_concat_are_inverse(lengths: list[int], parts: int) -> None:
    batch = marked_batch(lengths * parts)
    pieces = batch.split(parts)
    assert [len(piece) for piece in pieces] == [len(lengths)] * parts
    assert marks(StepBatch.concat(pieces)) == list(range(len(batch)))


def test_split_into_unequal_parts_is_refused() -> None:
    with pytest.raises(BatchError, match="5 rows cannot be split into 2 equal parts"):
        marked_batch([1] * 5).split(2)


@given(lengths_lists)
def test_a_batch_survives_pickling(lengths: list[int]) -> None:
    batch = marked_batch(lengths)
    again = pickle.loads(pickle.dumps(batch, protocol=5))
    assert again.names == batch.names
    assert marks(again) == list(range(len(lengths)))


def test_a_part_of_a_batch_does_not_pickle_the_whole() -> None:
    batch = StepBatch({"responses": jagged_of([1000] * 100), "rewards": torch.zeros(100)})
    assert len(pickle.dumps(batch.split(100)[0])) < len(pickle.dumps(batch)) / 50


def test_bfloat16_survives_pickling() -> None:
    values = Jagged(torch.arange(3, dtype=torch.bfloat16), torch.tensor([3]))
    assert torch.equal(pickle.loads(pickle.dumps(values)).values, values.values)


def test_arrays_received_read_only_are_not_written_through() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(marked_batch([2]), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer) for buffer in buffers]  # immutable, as the object store's are
    batch = pickle.loads(data, buffers=frozen)
    batch["step_index"][0] = 7
    assert int(pickle.loads(data, buffers=frozen)["step_index"][0]) == 0


def test_all_faults_of_the_columns_are_named_together() -> None:
    with pytest.raises(BatchError) as caught:
        StepBatch({"rewards": torch.tensor(1.0), "uid": np.array([1, 2]), "traj_uid": ["a", "b"]})  # type: ignore[dict-item]
    assert all(name in str(caught.value) for name in ("rewards", "uid", "traj_uid"))


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(BatchError, match=r"step_index: 2, rewards: 3"):
        StepBatch({"step_index": torch.arange(2), "rewards": torch.zeros(3)})


def test_a_response_column_with_other_lengths_is_refused() -> None:
    with pytest.raises(BatchError, match="response_mask has 2 tokens in row 1 where responses has 3"):
        StepBatch({"responses": jagged_of([1, 3]), "response_mask": jagged_of([1, 2])})


def test_an_unknown_column_is_named_with_those_there_are() -> None:
    with pytest.raises(BatchError, match="no column 'returns'; it has uid"):
        StepBatch({"uid": objects(["a"])})["returns"]


def test_concat_names_the_columns_that_differ() -> None:
    with pytest.raises(BatchError, match="batch 1 differs from batch 0 in the columns rewards"):
        StepBatch.concat(
            [
                StepBatch({"step_index": torch.arange(1)}),
                marked_batch([1]).select("step_index").with_columns(rewards=torch.zeros(1)),
            ]
        )


@pytest.mark.parametrize("indices", [[3], [-1], [0.5]])
def test_indices_that_are_no_rows_are_refused(indices: list[float]) -> None:
    with pytest.raises(BatchError, match="whole numbers from 0 to 2"):
        marked_batch([1, 1, 1]).take(indices)  # type: ignore[arg-type]


def test_with_columns_leaves_the_batch_as_it_was() -> None:
    batch = marked_batch([1, 2])
    more = batch.with_columns(rewards=torch.zeros(2))
    assert "rewards" in more
    assert "rewards" not in batch
    assert more["responses"] is batch["responses"]


def test_objects_keeps_tuples_whole() -> None:
    column = objects([("a", 1), ("b", 2)])
    assert column.shape == (2,)
    assert column[1] == ("b", 2)
