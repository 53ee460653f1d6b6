"""Hugging Face folders in and out: every rank reads its own boxes; full tensors are gathered one at a time.

All of it follows from the architecture's boxes. This file only moves bytes: it knows no tensor by name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megagent.errors import MegagentError
from megagent.parallel import platform
from megagent.parallel.degrees import Degrees, Place
from megagent.parallel.model import Stage
from megagent.parallel.models import Architecture
from megagent.parallel.models.architecture import split_name
from megagent.parallel.reshard.boxes import Shape

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# What belongs to a model besides its weights and config.json: tokenizer, generation settings, templates, licence.
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_SHARD_BYTES = 4 << 30
_OUTPUT = "output_layer."


def load_hf(stage: Stage, folder: str | Path) -> None:
    """Fill this rank's parameters, cast to their dtype, from the safetensors files of a Hugging Face folder.

    Each rank checks the headers of all files and reads only what it holds; padding becomes zeros. Not collective. Do it
    before the optimizer is made, which copies the weights. Raises MegagentError, before any parameter changes, that
    lists every missing, unexpected and misshapen tensor of the files and every parameter that the family does not know.
    """
    parameters = stage_parameters(stage)
    with _Weights(folder) as weights:
        weights.check(stage.architecture)
        for name, parameter in parameters.items():
            tensor = stage.architecture.local(name, stage.degrees, stage.place)
            for box in tensor.boxes:
                parameter.data[box.local_slices].copy_(weights.read(box.hf, box.hf_slices))
            for region in tensor.padding:
                parameter.data[region.slices].zero_()


def gather_hf(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor as (name, full tensor) on global rank 0, and nothing elsewhere.

    Collective: all ranks must run the iterator to its end. Tensors have the parameters' dtype and device and are the
    caller's own. Rank 0 holds one Megatron tensor's worth of them at a time. Raises MegagentError if the model's
    parameters are not the architecture's.
    """
    parameters = stage_parameters(stage)
    shapes = stage.architecture.hf_shapes()
    example = next(iter(parameters.values())).detach()
    for name, holders in _holders(stage.architecture, stage.degrees):
        here = stage.place.rank
        if here != 0 and here not in holders:
            continue
        layouts = {rank: stage.architecture.local(name, stage.degrees, stage.degrees.place(rank)) for rank in holders}
        if all(layout.boxes == layouts[holders[0]].boxes for layout in layouts.values()):
            layouts = {holders[0]: layouts[holders[0]]}  # all hold the same
        if here != 0:
            if here in layouts:
                dist.send(parameters[name].detach().contiguous(), dst=0)
            continue
        full: dict[str, Tensor] = {}
        for rank, layout in layouts.items():
            part = parameters[name].detach() if rank == here else example.new_empty(layout.shape)
            if rank != here:
                dist.recv(part, src=rank)
            for box in layout.boxes:
                if box.hf not in full:
                    full[box.hf] = example.new_empty(shapes[box.hf])
                full[box.hf][box.hf_slices].copy_(part[box.local_slices])
        yield from full.items()


def export_hf(
    stage: Stage,
    folder: str | Path,
    hf_config: Mapping[str, Any],
    source_folder: str | Path,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that transformers and vLLM load: weights, config.json, tokenizer and the like.

    hf_config: written with the weights' dtype; source_folder: where its companions are copied from; more than
    shard_bytes of weights become several files with an index. Collective; global rank 0 writes, beside the folder, and
    renames it when all is written: the folder is complete when rank 0 returns. Raises MegagentError on every rank if
    the folder exists and is not empty.
    """
    folder = Path(folder)
    writes = stage.place.rank == 0
    if _any_rank(writes and folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise MegagentError(f"{folder} exists already; choose another folder for the model or remove it")
    tensors = gather_hf(stage)
    if not writes:
        for _ in tensors:
            pass
        return
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():  # of a run that was killed while it wrote
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    dtype = next(stage.parameters()).dtype
    _write_weights(partial, tensors, stage.architecture.hf_shapes(), dtype, shard_bytes)
    for path in (path for pattern in _SIDE_FILES for path in Path(source_folder).glob(pattern)):
        if path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, partial / path.name)
    dtype_key = "dtype" if "dtype" in hf_config else "torch_dtype"  # transformers renamed it; readers know both
    config = {**hf_config, dtype_key: str(dtype).removeprefix("torch.")}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder)


def stage_parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """See named_parameters. Without the head of a value model, which no Hugging Face folder has."""
    return named_parameters(stage.chunks, stage.architecture, stage.degrees, stage.place, output=not stage.values)


def named_parameters(
    chunks: Sequence[nn.Module], architecture: Architecture, degrees: Degrees, place: Place, output: bool = True
) -> dict[str, nn.Parameter]:
    """A rank's parameters by canonical name, with the global numbers of layers and experts.

    chunks: its GPTModels, in the order of the pipeline; output: whether the output layer is the architecture's, else it
    is left out. Raises MegagentError that lists every parameter that the architecture does not know, lacks or shapes
    differently.
    """
    found: dict[str, nn.Parameter] = {}
    expected: list[str] = []
    problems: list[str] = []
    experts = architecture.experts_of(degrees, place)
    planned = [chunk for chunk in architecture.stages(degrees) if chunk.pp_rank == place.pp_rank]
    for chunk, model in zip(planned, chunks, strict=True):
        expected += architecture.chunk_names(chunk, experts)
        # The one place where Megatron's local numbers become global ones; its global number of a layer starts at 1.
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for local_name, parameter in model.named_parameters():
            if not output and local_name.startswith(_OUTPUT):
                continue
            name = architecture.canonical(local_name, layers, experts.start)
            if name is None:
                problems.append(f"unexpected {local_name} {list(parameter.shape)} among layers {layers}")
            else:
                found[name] = parameter
    for name in expected:
        if not output and name.startswith(_OUTPUT):
            continue
        if name not in found:
            problems.append(f"missing {name}")
            continue
        shape = architecture.local(name, degrees, place).shape
        if tuple(found[name].shape) != shape:
            problems.append(f"{name} is {list(found[name].shape)} and should be {list(shape)}")
    problems += [f"unexpected {name} on this stage" for name in found.keys() - set(expected)]
    if problems:
        raise MegagentError(
            f"the Megatron model is not the {architecture.family} model that its config describes; build it with the "
            "architecture's transformer_kwargs and gpt_kwargs:" + "".join(f"\n  {problem}" for problem in problems)
        )
    return found


def _holders(architecture: Architecture, degrees: Degrees) -> Iterator[tuple[str, list[int]]]:
    """(name, ranks of the first replica that hold a part) of every Megatron tensor of the model, in its order."""
    dense: dict[int, list[int]] = {}
    of_expert: dict[tuple[int, int], list[int]] = {}  # (stage, expert) -> ranks
    for place in degrees.places():
        if place.dp_rank == 0:
            dense.setdefault(place.pp_rank, []).append(place.rank)
        if place.edp_rank == 0:
            for expert in architecture.experts_of(degrees, place):
                of_expert.setdefault((place.pp_rank, expert), []).append(place.rank)
    names = set(architecture.megatron_names())  # without the copy of a tied embedding
    for chunk in architecture.stages(degrees):
        for name in architecture.chunk_names(chunk):
            template, _, expert = split_name(name)
            if name in names:
                is_expert = architecture.row(template).of_experts
                yield name, of_expert[chunk.pp_rank, expert] if is_expert else dense[chunk.pp_rank]


def _any_rank(fault: bool) -> bool:
    """Whether it is so on any rank. Collective."""
    found = torch.tensor([int(fault)], device=platform.current().device)
    dist.all_reduce(found)
    return bool(found.item())


class _Weights:
    """The safetensors files of a folder: headers at once, slices on demand. A context manager that closes them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}

    def __enter__(self) -> _Weights:
        problems = []
        for file in self._file_names():
            try:
                handle = safe_open(self.folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                problems.append(f"{file}: {error}")
                continue
            self._files[file] = handle.__enter__()
            names = handle.keys()
            problems += [f"{name} is in {self._file_of[name]} and in {file}" for name in names if name in self._file_of]
            self._file_of |= dict.fromkeys(names, file)
        if problems:
            self.__exit__()
            raise MegagentError(
                f"{self.folder}: weights cannot be read; download or copy them again:"
                + "".join(f"\n  {p}" for p in problems)
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._files.values():
            handle.__exit__(None, None, None)

    def _file_names(self) -> list[str]:
        if (self.folder / _WEIGHTS).is_file():
            return [_WEIGHTS]
        index = self.folder / _INDEX
        if not index.is_file():
            raise MegagentError(
                f"{self.folder}: there is neither {_WEIGHTS} nor {_INDEX}; give a folder with weights in that format"
            )
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if any(Path(name).name != name for name in names):
                raise ValueError("a file outside of the folder")
            return names
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MegagentError(f"{index} is not an index of safetensors files; download or copy it again") from None

    def check(self, architecture: Architecture) -> None:
        """Raises MegagentError with every difference between the files' tensors and those of the config's model."""
        parts = {name: self._files[file].get_slice(name) for name, file in self._file_of.items()}
        problems = architecture.hf_problems(
            {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
        )
        if not problems:
            # Some writers store a tied output layer too. It may be left out only because it says nothing new.
            problems = [
                f"{copy} differs from {original}, and config.json ties them"
                for copy, original in architecture.tied_hf_names().items()
                if copy in self._file_of and not self._equal(copy, original)
            ]
        if problems:
            raise MegagentError(
                f"{self.folder}: the weights are not those of the {architecture.family} model in config.json; take "
                "both from one model:" + "".join(f"\n  {problem}" for problem in problems)
            )

    def read(self, name: str, slices: tuple[int | slice, ...]) -> Tensor:
        """A part of a tensor, in the file's dtype, on the CPU."""
        return self._files[self._file_of[name]].get_slice(name)[slices]

    def _equal(self, one: str, other: str, rows: int = 4096) -> bool:
        count = self._files[self._file_of[one]].get_slice(one).get_shape()[0]
        parts = (slice(start, min(start + rows, count)) for start in range(0, count, rows))
        return all(torch.equal(self.read(one, (part,)), self.read(other, (part,))) for part in parts)


def _write_weights(
    folder: Path,
    tensors: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Write tensors as they come. File names hold the number of files, which follows from the shapes beforehand."""
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    shard_of: dict[str, int] = {}
    shard, filled = 0, 0
    for name, size in sizes.items():
        if filled and filled + size > shard_bytes:
            shard, filled = shard + 1, 0
        shard_of[name] = shard
        filled += size
    count = shard + 1
    files = [_WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    missing = Counter(shard_of.values())
    held: list[dict[str, Tensor]] = [{} for _ in files]
    for name, tensor in tensors:
        number = shard_of[name]
        held[number][name] = tensor.cpu()
        missing[number] -= 1
        if not missing[number]:
            save_file(held[number], folder / files[number], metadata={"format": "pt"})
            held[number] = {}
    if count > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: files[number] for name, number in shard_of.items()},
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
