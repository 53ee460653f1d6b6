"""Taking over received weights: layers of numbers to check by hand, and an end that has all of them at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megagent.errors import InfrastructureError
from megagent.parallel.reshard.apply import Incoming, InPlace, LiveTensor, Repacked
from megagent.parallel.reshard.boxes import Box, LocalTensor, Region
from megagent.parallel.reshard.checksum import copy_checksum
from megagent.parallel.reshard.plan import Copy
from megagent.parallel.reshard.rounds import Rounds
from megagent.parallel.reshard.transports.base import Destination


class Packing:
    """A quant method that keeps twice the weight and drops the parameter, as vLLM's CPU kernels keep a packed form."""

    def __init__(self, drops: bool) -> None:
        self.drops = drops
        self.packings = 0
        self.moe_kernel: object | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        self.packings += 1
        layer.packed = 2 * layer.weight.detach().clone()
        layer.added = None if layer.bias is None else layer.bias.detach().clone()
        if self.drops:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Layer(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None, drops: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.quant_method = Packing(drops)
        self.quant_method.process_weights_after_loading(self)


class End:
    """A receiving end whose tensors are at hand: name of the source -> tensor."""

    def __init__(self, sources: Mapping[str, Tensor], changed: bool = False) -> None:
        self.sources, self.changed = sources, changed
        self.rounds: list[list[str]] = []
        self.finished = False

    def open(self, offers: Mapping[int, Mapping[str, Any]], version: int) -> None:
        pass

    def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
        copies = list(copies)
        self.rounds.append([copy.target for copy in copies])
        for copy in copies:
            destination(copy).copy_(self.sources[copy.source][copy.source_slices])
        return sum(destination(copy).nbytes for copy in copies)

    def finish(self) -> None:
        if self.changed:
            raise InfrastructureError("the weights changed while they were read")
        self.finished = True

    def close(self) -> None:
        pass


def whole(name: str, shape: tuple[int, ...], filled: int | None = None) -> LocalTensor:
    """A tensor of fp32 whose rows from `filled` on are padding."""
    rows, origin = shape[0] if filled is None else filled, (0,) * len(shape)
    boxes = (Box(name, origin, origin, (rows, *shape[1:])),) if rows else ()
    padding = (Region((rows, *origin[1:]), (shape[0] - rows, *shape[1:])),) if rows < shape[0] else ()
    return LocalTensor(name, shape, boxes, padding, "F32")


def copy_of(name: str, shape: tuple[int, ...], row: int = 0, rank: int = 0) -> Copy:
    """`shape` elements from row `row` on, from the source of the same name."""
    start = (row, *(0,) * (len(shape) - 1))
    return Copy(0, name, start, rank, name, start, shape)


def linear(drops: bool = True) -> tuple[Layer, dict[str, LiveTensor]]:
    layer = Layer(torch.zeros(2, 2), torch.zeros(2), drops)
    shapes = {"weight": (2, 2), "bias": (2,)}
    return layer, {
        name: LiveTensor(whole(name, shape), layer, name, (layer,), kept=not drops) for name, shape in shapes.items()
    }


NEW = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "bias": torch.tensor([5.0, 6.0])}
ROUNDS: Rounds = ((copy_of("weight", (1, 2)),), (copy_of("weight", (1, 2), row=1), copy_of("bias", (2,))))


def test_a_layer_is_packed_once_and_from_all_of_its_new_tensors() -> None:
    layer, live = linear()
    Incoming(ROUNDS, 0, live).receive(End(NEW), Repacked(live), 1)
    assert layer.packed.tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert layer.added.tolist() == [5.0, 6.0]
    assert layer.quant_method.packings == 2  # at the start, and now
    assert layer.weight.numel() == 0


def test_a_layer_takes_over_one_version_after_the_other() -> None:
    layer, live = linear()
    incoming, target = Incoming(ROUNDS, 0, live), Repacked(live)
    incoming.receive(End(NEW), target, 1)
    incoming.receive(End({name: 10 * tensor for name, tensor in NEW.items()}), target, 2)
    assert layer.packed.tolist() == [[20.0, 40.0], [60.0, 80.0]]


def test_in_place_the_addresses_stay() -> None:
    layer, live = linear(drops=False)
    before = layer.weight.data_ptr(), layer.bias.data_ptr()
    Incoming(ROUNDS, 0, live).receive(End(NEW), InPlace(live), 1)
    assert (layer.weight.data_ptr(), layer.bias.data_ptr()) == before
    assert layer.weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert layer.quant_method.packings == 1


def test_both_layers_of_a_tied_parameter_are_packed_anew() -> None:
    embedding = Layer(torch.zeros(2, 2), drops=False)
    head = Layer(torch.zeros(2, 2), drops=False)
    head.weight = embedding.weight
    live = {"weight": LiveTensor(whole("weight", (2, 2)), embedding, "weight", (embedding, head), kept=True)}
    Incoming(((copy_of("weight", (2, 2)),),), 0, live).receive(End(NEW), Repacked(live), 1)
    assert embedding.weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert embedding.packed.tolist() == head.packed.tolist() == [[2.0, 4.0], [6.0, 8.0]]


@pytest.mark.parametrize("filled", [0, 1])
@pytest.mark.parametrize("kind", [InPlace, Repacked])
def test_padding_becomes_zero_also_where_nothing_else_comes(kind: type, filled: int) -> None:
    """The last ranks of a padded vocabulary may hold padding only, and no copy goes there."""
    layer = Layer(torch.full((2, 2), 7.0), drops=False)
    live = {"weight": LiveTensor(whole("weight", (2, 2), filled), layer, "weight", (layer,), kept=True)}
    rounds = ((copy_of("weight", (filled, 2)),),) if filled else ()
    Incoming(rounds, 0, live).receive(End(NEW), kind(live), 1)
    assert layer.weight.tolist() == ([[1.0, 2.0], [0.0, 0.0]] if filled else [[0.0, 0.0], [0.0, 0.0]])
    assert layer.quant_method.packings == (2 if kind is Repacked else 1)


def test_experts_that_have_a_kernel_are_packed_all_the_same() -> None:
    """vLLM packs experts only while their layer has no kernel."""
    layer, live = linear()
    layer.quant_method.moe_kernel = object()
    Incoming(ROUNDS, 0, live).receive(End(NEW), Repacked(live), 1)
    assert layer.quant_method.moe_kernel is None


def test_copies_of_other_workers_are_theirs() -> None:
    _, live = linear()
    others = tuple(copy_of("weight", (2, 2), rank=1) for _ in range(2))
    end = End(NEW)
    Incoming((others, (*ROUNDS[0], *others), *ROUNDS[1:]), 0, live).receive(end, Repacked(live), 1)
    assert end.rounds == [["weight"], ["weight", "bias"]]


def test_a_report_says_bytes_and_the_checksums_of_what_was_written() -> None:
    _, live = linear()
    report = Incoming(ROUNDS, 0, live).receive(End(NEW), Repacked(live), 4, copy_checksum)
    assert (report.version, report.bytes) == (4, 4 * 6)
    assert report.checksums == {name: copy_checksum(copy_of(name, tuple(NEW[name].shape)), NEW[name]) for name in NEW}
    assert Incoming(ROUNDS, 0, live).receive(End(NEW), Repacked(live), 5).checksums == {}


def test_weights_that_changed_while_they_were_read_are_an_error() -> None:
    _, live = linear()
    with pytest.raises(InfrastructureError, match="changed"):
        Incoming(ROUNDS, 0, live).receive(End(NEW, changed=True), Repacked(live), 1)


def test_a_whole_sync_mends_what_a_broken_one_has_left() -> None:
    layer, live = linear()
    incoming, target = Incoming(ROUNDS, 0, live), Repacked(live)

    class Ending(End):
        def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
            if self.rounds:
                raise InfrastructureError("the trainer is gone")
            return super().fetch(copies, destination)

    with pytest.raises(InfrastructureError, match="gone"):
        incoming.receive(Ending({name: -tensor for name, tensor in NEW.items()}), target, 1)
    incoming.receive(End(NEW), target, 1)
    assert layer.packed.tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert layer.added.tolist() == [5.0, 6.0]


def test_one_layer_is_fresh_at_a_time_where_one_follows_the_other() -> None:
    layers = [Layer(torch.zeros(1, 2)) for _ in range(3)]
    live = {
        str(number): LiveTensor(whole(str(number), (1, 2)), layer, "weight", (layer,), kept=False)
        for number, layer in enumerate(layers)
    }
    target, most = Repacked(live), 0

    class Watching(End):
        def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
            nonlocal most
            moved = super().fetch(copies, destination)
            most = max(most, len(target._fresh))
            return moved

    rounds = tuple((copy_of(name, (1, 2)),) for name in live)
    Incoming(rounds, 0, live).receive(Watching({name: torch.ones(1, 2) for name in live}), target, 1)
    assert most == 1
    assert target._fresh == {}


def test_memory_that_a_layer_has_not_kept_serves_the_next_one_and_the_next_sync() -> None:
    layers = [Layer(torch.zeros(1, 2), torch.zeros(1)) for _ in range(3)]
    live = {
        f"{part}-{number}": LiveTensor(whole(f"{part}-{number}", shape), layer, part, (layer,), kept=False)
        for number, layer in enumerate(layers)
        for part, shape in (("weight", (1, 2)), ("bias", (1,)))
    }
    target, addresses = Repacked(live), {}

    class Watching(End):
        def fetch(self, copies: Iterable[Copy], destination: Destination) -> int:
            addresses.update({copy.target: destination(copy).data_ptr() for copy in copies})
            return super().fetch(copies, destination)

    rounds = tuple((copy_of(name, each.tensor.shape),) for name, each in live.items())
    sources = {name: torch.full(each.tensor.shape, float(number)) for number, (name, each) in enumerate(live.items())}
    incoming = Incoming(rounds, 0, live)
    incoming.receive(Watching(sources), target, 1)
    before = dict(addresses)
    incoming.receive(Watching(sources), target, 2)
    assert {addresses[f"weight-{number}"] for number in range(3)} == {before["weight-0"]}  # packed, and dropped
    assert len({addresses[f"bias-{number}"] for number in range(3)}) == 3  # the layers' own
    assert [(layer.packed.tolist(), layer.bias.tolist()) for layer in layers] == [
        ([[0.0, 0.0]], [1.0]),
        ([[4.0, 4.0]], [3.0]),
        ([[8.0, 8.0]], [5.0]),
    ]


def test_memory_that_a_layer_holds_without_a_parameter_is_its_own() -> None:
    """As kernels do that compute with the weight as it is while the layer drops the parameter."""
    layers = [Layer(torch.zeros(1, 2)) for _ in range(2)]
    for layer in layers:

        def hold(layer: Any) -> None:
            layer.held = layer.weight.detach()
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

        layer.quant_method.process_weights_after_loading = hold
    live = {
        str(number): LiveTensor(whole(str(number), (1, 2)), layer, "weight", (layer,), kept=False)
        for number, layer in enumerate(layers)
    }
    rounds = tuple((copy_of(name, (1, 2)),) for name in live)
    Incoming(rounds, 0, live).receive(End({"0": torch.ones(1, 2), "1": torch.zeros(1, 2)}), Repacked(live), 1)
    assert [layer.held.tolist() for layer in layers] == [[[1.0, 1.0]], [[0.0, 0.0]]]
