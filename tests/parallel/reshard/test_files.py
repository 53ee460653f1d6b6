"""Which tensors go to which file."""

from __future__ import annotations

from megagent.parallel.reshard import files
from megagent.parallel.reshard.boxes import Region


def test_files_are_filled_in_order_and_a_tensor_is_never_split() -> None:
    shapes = {"a": (2, 2), "b": (2,), "c": (10,), "d": (1,)}
    sharded = files.sharded(shapes, "F32", shard_bytes=24)
    assert [list(file) for file in sharded] == [["a", "b"], ["c"], ["d"]]
    assert sharded[0]["a"] == ("F32", (2, 2))


def test_a_file_holds_whole_tensors() -> None:
    layout = files.layout([{"a": ("F32", (2, 3))}, {"b": ("BF16", ())}])
    assert layout.problems({"a": (2, 3), "b": ()}) == []
    (box,) = layout.tensor(0, "a").boxes
    assert Region(box.hf_start, box.shape) == Region(box.local_start, box.shape) == Region((0, 0), (2, 3))
    assert layout.tensor(1, "b").dtype == "BF16"
