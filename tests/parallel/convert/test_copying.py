"""Tasks between files do what their plan says, however the tensors are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from megagent.errors import MegagentError
from megagent.parallel.convert import copying
from megagent.parallel.convert.stored import Extent
from megagent.parallel.degrees import Degrees
from megagent.parallel.models import Architecture
from megagent.parallel.reshard import files, hold, megatron
from megagent.parallel.reshard.layout import Layout
from megagent.parallel.reshard.plan import make_plan
from tests.parallel.reshard.arrays import Arrays, assert_equal, numbered, scattered
from tests.parallel.reshard.random_models import placed_models


def on_disk(folder: Path, name: str, layout: Layout, held: dict[int, Arrays]) -> dict[tuple[int, str], Extent]:
    """A file for each rank with its arrays one after the other, an odd number of bytes from its start."""
    extents = {}
    for rank, arrays in held.items():
        path = folder / f"{name}{rank}"
        with open(path, "wb") as file:
            file.write(bytes(5))
            for key, array in arrays.items():
                extents[rank, key] = Extent(str(path), file.tell(), "F32", array.shape)
                file.write(array.astype(np.uint32).tobytes())
    return extents


def from_disk(extents: dict[tuple[int, str], Extent]) -> dict[int, Arrays]:
    found: dict[int, Arrays] = {}
    for (rank, name), extent in extents.items():
        data = Path(extent.path).read_bytes()[extent.offset : extent.offset + extent.size]
        found.setdefault(rank, {})[name] = np.frombuffer(data, np.uint32).reshape(extent.shape)
    return found


def check(folder: Path, source: Layout, target: Layout, full: Arrays) -> None:
    held = scattered(source, full)
    plan = make_plan(source, target)
    expected = hold.allocate(target, lambda shape: np.zeros(shape, dtype=int))
    hold.execute(plan, held, expected)
    here = on_disk(folder, "source", source, held)
    there = on_disk(folder, "target", target, hold.allocate(target, lambda shape: np.zeros(shape, dtype=int)))
    copying.perform(list(enumerate(copying.tasks(plan, here, there))), 1, lambda *_: None, "test")
    assert_equal(from_disk(there), expected)


@given(placed_models())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_files_from_any_ranks_and_back_are_what_the_plan_makes_of_them(
    tmp_path_factory: pytest.TempPathFactory, placed: tuple[Architecture, Degrees]
) -> None:
    model, degrees = placed
    shapes = model.hf_shapes()
    ranks = megatron.layout(model, degrees, "F32")
    whole = files.layout(files.sharded(shapes, "F32", shard_bytes=300))
    folder = tmp_path_factory.mktemp("copying")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BLOCK", 7)
        patch.setattr(copying, "RUN", 60)
        patch.setattr(copying, "TASK", 200)
        check(folder, ranks, whole, numbered(shapes))
        check(folder, whole, ranks, numbered(shapes))


def test_a_source_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(10))
    (tmp_path / "target").write_bytes(bytes(20))
    task = copying.Task(20, (copying.Run(str(tmp_path / "source"), 0, str(tmp_path / "target"), 0, 20),))
    with pytest.raises(MegagentError, match="source became shorter while it was read"):
        copying.perform([(0, task)], 1, lambda *_: None, "test")
