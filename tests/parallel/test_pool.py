"""The pool of rank processes itself: a failure ends a test in time and does not harm the next one."""

from __future__ import annotations

import os
import time

import pytest

from tests.parallel import jobs
from tests.parallel.pool import JobFailed, RankPool

pytestmark = pytest.mark.slow


def dying_job(start: jobs.Start) -> None:
    os._exit(3)


def sleeping_job(start: jobs.Start) -> None:
    time.sleep(600)


def process_job(start: jobs.Start) -> int:
    return os.getpid()


def test_workers_serve_many_jobs(ranks: RankPool) -> None:
    assert ranks.run(process_job, 2) == ranks.run(process_job, 2)


def test_a_dead_worker_is_an_error_and_is_replaced(ranks: RankPool) -> None:
    before = ranks.run(process_job, 1)
    with pytest.raises(JobFailed, match="rank 0 died"):
        ranks.run(dying_job, 1)
    assert ranks.run(process_job, 1) != before


def test_a_hung_worker_is_an_error_within_its_deadline(ranks: RankPool) -> None:
    ranks.run(process_job, 1)
    begun = time.monotonic()
    with pytest.raises(JobFailed, match=r"ranks \[0\] did not end within 1 s"):
        ranks.run(sleeping_job, 1, seconds=1.0)
    assert time.monotonic() - begun < 30
