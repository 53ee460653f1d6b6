from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megagent.algos.packing import dp_imbalance, laid_tokens
from megagent.algos.shares import Share, equal_shares, gathered, mini_batches, token_shares
from megagent.batch import Jagged, StepBatch
from megagent.config import Config, TrainerConfig
from megagent.errors import BatchError

BUDGET = 600


def configured(dp: int = 2, pp: int = 1, vpp: int = 1, epochs: int = 1, pack_rows: bool = False) -> Config:
    config = Config()
    config.parallel.dp, config.parallel.pp, config.parallel.vpp = dp, pp, vpp
    config.trainer.micro_batch_tokens, config.trainer.mini_batch_rows = BUDGET, 20
    config.trainer.epochs, config.trainer.pack_rows = epochs, pack_rows
    return config


configs = st.builds(
    configured,
    dp=st.integers(1, 4),
    pp=st.integers(2, 3),
    vpp=st.integers(1, 2),
    epochs=st.integers(1, 2),
    pack_rows=st.booleans(),
)
lengths_of = st.lists(st.integers(1, BUDGET), min_size=1, max_size=50).map(torch.tensor)


def batch_rows(share: Share) -> list[list[Tensor]]:
    """[step][micro-batch]: rows of the batch."""
    assert share.steps is not None
    return [[share.rows[part] for part in step.rows()] for step in share.steps]


@given(config=configs, lengths=lengths_of)
def test_an_optimizer_step_holds_the_rows_of_its_mini_batch_whatever_the_ranks(config: Config, lengths: Tensor) -> None:
    shares = [batch_rows(share) for share in token_shares(lengths, config, 64, update=3)]
    mine = [sorted(torch.cat([part for share in shares for part in share[s]]).tolist()) for s in range(len(shares[0]))]
    expected = mini_batches(len(lengths), config.trainer.mini_batch_rows, config.trainer, update=3)
    assert mine == [sorted(rows.tolist()) for rows in expected]


@given(config=configs, lengths=lengths_of)
def test_no_rank_lacks_the_micro_batch_that_its_peers_wait_for(config: Config, lengths: Tensor) -> None:
    shares = [batch_rows(share) for share in token_shares(lengths, config, 64, update=0)]
    for steps in zip(*shares, strict=True):
        counts = {len(step) for step in steps}
        assert len(counts) == 1
        assert counts.pop() % (config.parallel.pp if config.parallel.vpp > 1 else 1) == 0


@given(config=configs, lengths=lengths_of)
def test_every_micro_batch_is_within_the_budget(config: Config, lengths: Tensor) -> None:
    for share in token_shares(lengths, config, 64, update=0):
        for step in batch_rows(share):
            assert all(laid_tokens(lengths[part], config.trainer.pack_rows) <= BUDGET for part in step)


@given(config=configs, lengths=lengths_of)
def test_answers_come_back_in_the_order_of_the_batch(config: Config, lengths: Tensor) -> None:
    prompts = Jagged(torch.arange(int(lengths.sum())), lengths)
    batch = StepBatch({"prompts": prompts})
    shares = token_shares(lengths, config, 64)
    answers = [share.of(batch)["prompts"].take(range(len(share.rows))) for share in shares]
    together = gathered(answers, shares)
    assert torch.equal(together.values, prompts.values)
    assert torch.equal(together.lengths, lengths)


def test_a_replica_without_rows_is_sent_one_and_computes_none() -> None:
    shares = token_shares(torch.tensor([7]), configured(dp=2, pp=2, vpp=2), 64)
    batch = StepBatch({"prompts": Jagged.from_list([torch.arange(7)])})
    assert sorted(len(share.rows) for share in shares) == [0, 1]
    assert [len(share.of(batch)) for share in shares] == [1, 1]
    assert [len(share.steps[0]) for share in shares if share.steps] == [2, 2]


def test_a_row_of_several_epochs_is_sent_once() -> None:
    [share] = token_shares(torch.tensor([5, 6, 7]), configured(dp=1, epochs=2), 64, update=0)
    assert share.rows.tolist() == [0, 1, 2]
    assert share.steps is not None
    assert [sorted(step.values.tolist()) for step in share.steps] == [[0, 1, 2], [0, 1, 2]]


def test_attention_makes_a_long_row_as_dear_as_many_short_ones() -> None:
    """A row of 240 tokens and 48 of 10. By tokens the two ranks get 360 each; where attention costs as much as the rest
    from 24 tokens on, the long row is worth 11 x 240 and has a rank for itself."""
    lengths, config = torch.tensor([240] + [10] * 48), configured(pack_rows=True)
    assert [len(share.rows) for share in token_shares(lengths, config, hidden=10**6)] == [13, 36]
    assert [len(share.rows) for share in token_shares(lengths, config, hidden=2)] == [1, 48]


def test_a_share_travels_as_what_it_is() -> None:
    [share] = token_shares(torch.randint(1, 99, (2000,)), configured(dp=1), 64)
    assert len(pickle.dumps(share)) < 3 * 8 * 2000
    again = pickle.loads(pickle.dumps(share))
    assert torch.equal(again.steps[0].values, share.steps[0].values)


def test_by_rows_the_parts_are_contiguous_and_equal() -> None:
    assert [share.rows.tolist() for share in equal_shares(6, 2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(BatchError, match="7 rows cannot be split into 2 equal parts"):
        equal_shares(7, 2)


def test_a_batch_without_rows_is_told() -> None:
    with pytest.raises(BatchError, match="no rows to make micro-batches of"):
        token_shares(torch.tensor([], dtype=torch.int64), configured(), 64)


def test_each_epoch_is_another_order_that_its_seed_fixes() -> None:
    trainer = TrainerConfig(epochs=2)
    first = mini_batches(40, 20, trainer, update=5)
    assert [len(rows) for rows in first] == [20, 20, 20, 20]
    assert torch.equal(torch.cat(first), torch.cat(mini_batches(40, 20, trainer, update=5)))
    orders = [first[0], first[2], *(mini_batches(40, 20, trainer, 5, replica)[0] for replica in (1, 2))]
    orders.append(mini_batches(40, 20, trainer, update=6)[0])
    assert len({tuple(order.tolist()) for order in orders}) == 5


def test_ranks_wait_for_the_busiest_of_every_step() -> None:
    """Steps of 10 and 30, then 30 and 10 tokens: the sums are even, and yet each step lasts 30 of 20."""
    assert dp_imbalance(torch.tensor([[10, 30], [30, 10]])) == pytest.approx(0.5)
