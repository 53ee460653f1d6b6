"""Sums over the bits of moved elements, made at both ends of a weight sync and compared by the driver.

Every element weighs an odd number that follows from its position in the target's tensor: the sums of a tensor's copies,
made anywhere in any order, add up to the sum of the tensor, and elements in each other's place change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megagent.parallel.reshard.plan import Copy

Checksums = dict[int, dict[str, int]]  # target rank -> name of its tensor -> sum modulo 2**64

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64
_AT_ONCE = 1 << 17  # elements: a megabyte of 64-bit integers, which stays in a core's cache


def copy_checksum(copy: Copy, part: Tensor) -> int:
    """Of what a copy moves, from 0 to 2**64 - 1. part: its elements in the target's dtype, of the copy's shape."""
    bits = part.view(_BITS[part.element_size()]) if part.dim() else part.reshape(1).view(_BITS[part.element_size()])
    fixed = len(copy.target_start) - part.dim()
    weights = [
        _weights(fixed + axis, copy.target_start[fixed + axis], length, part.device)
        for axis, length in enumerate(part.shape)
    ]
    total = _weighted(bits, weights) if weights else int(bits)
    for axis, position in enumerate(copy.target_start[:fixed]):
        total *= int(_weights(axis, position, 1, torch.device("cpu")))
    return total % _MODULUS


def add_checksum(sums: dict[str, int], name: str, value: int) -> None:
    """Count a copy's sum to that of its tensor."""
    sums[name] = (sums.get(name, 0) + value) % _MODULUS


def merge(sums: Iterable[Mapping[int, Mapping[str, int]]]) -> Checksums:
    """What several senders moved, of each target's tensors."""
    merged: Checksums = {}
    for each in sums:
        for rank, named in each.items():
            for name, value in named.items():
                add_checksum(merged.setdefault(rank, {}), name, value)
    return merged


def differences(sent: Mapping[int, Mapping[str, int]], received: Mapping[int, Mapping[str, int]]) -> list[str]:
    """One line for each tensor that was not received as it was sent; empty if there is none."""
    found = []
    for rank in sorted(sent.keys() | received.keys()):
        one, other = sent.get(rank, {}), received.get(rank, {})
        # A tensor of which nothing is moved is all padding; neither side need name it.
        names = [name for name in sorted(one.keys() | other.keys()) if one.get(name, 0) != other.get(name, 0)]
        found += [f"{name} on worker {rank}" for name in names]
    return found


def _weighted(bits: Tensor, weights: list[Tensor]) -> int:
    """Sum of the bits, each times the weights of its position on every axis. Integers wrap, as everywhere here."""
    rows = max(1, _AT_ONCE // max(1, bits[:1].numel()))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), rows):
        part = bits[start : start + rows].to(torch.int64)
        for axis_weights in reversed(weights[1:]):
            part = (part * axis_weights).sum(-1)
        total += (part * weights[0][start : start + rows]).sum()
    return int(total)


def _weights(axis: int, start: int, length: int, device: torch.device) -> Tensor:
    """An odd number for each position from `start` on: [length]."""
    value = torch.arange(start + 1, start + length + 1, dtype=torch.int64, device=device)
    # Positions spread over all bits (the multipliers are those of splitmix64), so that no two errors are likely to
    # cancel each other.
    value = value * -0x61C8864680B583EB + (axis + 1) * 0x1B873593
    value = (value ^ (value >> 30)) * -0x40A7B892E31B1A47
    return (value ^ (value >> 27)) | 1
