"""Hugging Face folders in and out: every rank reads its own boxes; full tensors are gathered one at a time.

All of it follows from the family's boxes. This file only moves bytes: it knows no tensor by name.
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
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megagent.errors import MegagentError
from megagent.parallel.models.family import Family, LocalTensor, Shape

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = {"F64", "F32", "F16", "BF16"}
# What belongs to a model besides its weights and config.json: tokenizer, generation settings, templates, licence.
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_SHARD_BYTES = 4 << 30


def load_hf(
    model_chunks: Sequence[nn.Module], family: Family, hf_config: Mapping[str, Any], folder: str | Path
) -> None:
    """Fill this rank's parameters, cast to their dtype, from the safetensors files of a Hugging Face folder.

    Each rank checks the headers of all files and reads only what it holds; padding becomes zeros. Not collective. Do it
    before the optimizer is made, which copies the weights. Raises MegagentError, before any parameter changes, that
    lists every missing, unexpected and misshapen tensor of the files and every parameter that the family does not know.
    """
    parameters = named_parameters(model_chunks, family, hf_config)
    tp, rank = _tensor_ranks()
    with _Weights(folder) as weights:
        weights.check(family, hf_config)
        for name, parameter in parameters.items():
            tensor = family.local(hf_config, name, rank, tp)
            for box in tensor.boxes:
                parameter.data[box.local_slices].copy_(weights.read(box.hf, box.hf_slices))
            for region in tensor.padding:
                parameter.data[region.slices].zero_()


def gather_hf(
    model_chunks: Sequence[nn.Module], family: Family, hf_config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor as (name, full tensor) on global rank 0, and nothing elsewhere.

    Collective over the tensor- and pipeline-parallel ranks of the first data-parallel replica: all of them must run the
    iterator to its end. Tensors have the parameters' dtype and device and are the caller's own. Rank 0 holds one
    Megatron tensor's worth of them at a time. Raises MegagentError if the model's parameters are not the family's.
    """
    parameters = named_parameters(model_chunks, family, hf_config)
    if _replica() != 0:
        return
    tp, tp_rank = _tensor_ranks()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stage_of = _stage_of(parameters, family, hf_config)
    dtype, device = _dtype_and_device(parameters)
    full_shapes = family.hf_shapes(hf_config)
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    for name in family.megatron_names(hf_config):
        layouts = [family.local(hf_config, name, rank, tp) for rank in range(tp)]
        shapes = {box.hf: full_shapes[box.hf] for layout in layouts for box in layout.boxes}
        full: dict[str, Tensor] = {}
        if stage == stage_of[name]:
            full = _assemble(parameters[name].detach(), layouts, shapes)
        if tp_rank != 0:
            continue
        if stage == stage_of[name] != 0:
            for tensor in full.values():
                dist.send(tensor, group=pp_group, group_dst=0)
        elif stage == 0 != stage_of[name]:
            for hf_name, shape in shapes.items():
                full[hf_name] = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(full[hf_name], group=pp_group, group_src=stage_of[name])
        if stage == 0:
            yield from full.items()


def export_hf(
    model_chunks: Sequence[nn.Module],
    family: Family,
    hf_config: Mapping[str, Any],
    folder: str | Path,
    source_folder: str | Path,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that transformers and vLLM load: weights, config.json, tokenizer and the like.

    source_folder: where config.json's companions are copied from; more than shard_bytes of weights become several files
    with an index. Collective as `gather_hf`; global rank 0 writes, beside the folder, and renames it when all is
    written: the folder is complete when rank 0 returns. Raises MegagentError if the folder exists and is not empty.
    """
    folder = Path(folder)
    if _replica() != 0:
        # Not even a look at the folder: rank 0, which does not wait for this replica, may have written it already.
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MegagentError(f"{folder} exists already; choose another folder for the model or remove it")
    tensors = gather_hf(model_chunks, family, hf_config)
    if dist.get_rank() != 0:
        for _ in tensors:
            pass
        return
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():  # of a run that was killed while it wrote
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    dtype, _ = _dtype_and_device(named_parameters(model_chunks, family, hf_config))
    _write_weights(partial, tensors, family.hf_shapes(hf_config), dtype, shard_bytes)
    for path in (path for pattern in _SIDE_FILES for path in Path(source_folder).glob(pattern)):
        if path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, partial / path.name)
    dtype_key = "dtype" if "dtype" in hf_config else "torch_dtype"  # transformers renamed it; readers know both
    config = {**hf_config, dtype_key: str(dtype).removeprefix("torch.")}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder)


def named_parameters(
    model_chunks: Sequence[nn.Module], family: Family, hf_config: Mapping[str, Any]
) -> dict[str, nn.Parameter]:
    """This rank's parameters by canonical name with the global layer number, whatever wraps the chunks.

    Raises MegagentError that lists every parameter that the family does not know, lacks or shapes differently.
    """
    tp, rank = _tensor_ranks()
    found: dict[str, nn.Parameter] = {}
    expected: list[str] = []
    problems: list[str] = []
    for wrapped in model_chunks:
        chunk: Any = wrapped
        while hasattr(chunk, "module"):  # DistributedDataParallel, Float16Module
            chunk = chunk.module
        # The one place where Megatron's stage-local position of a layer becomes its global number, which starts at 1.
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        expected += family.stage_names(hf_config, numbers, chunk.pre_process, chunk.post_process)
        for local_name, parameter in chunk.named_parameters():
            name = _global_name(local_name, numbers)
            canonical = family.canonical(name)
            if canonical is None:
                problems.append(f"unexpected {name} {list(parameter.shape)}")
            else:
                found[canonical] = parameter
    for name in expected:
        if name not in found:
            problems.append(f"missing {name}")
            continue
        shape = family.local(hf_config, name, rank, tp).shape
        if tuple(found[name].shape) != shape:
            problems.append(f"{name} is {list(found[name].shape)} and should be {list(shape)}")
    problems += [f"unexpected {name} on this stage" for name in found if name not in set(expected)]
    if problems:
        raise MegagentError(
            f"the Megatron model is not the {family.name} model that its config describes; build it with the family's "
            "transformer_kwargs and gpt_kwargs:" + "".join(f"\n  {problem}" for problem in problems)
        )
    return found


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
            self._file_of |= dict.fromkeys(handle.keys(), file)
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
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MegagentError(f"{index} is not an index of safetensors files; download or copy it again") from None

    def check(self, family: Family, hf_config: Mapping[str, Any]) -> None:
        """Raises MegagentError with every difference between the files' tensors and those of the config's model."""
        expected = family.hf_shapes(hf_config)
        tied = family.tied_hf_names(hf_config)
        problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in self._file_of]
        for name in self._file_of:
            part = self._files[self._file_of[name]].get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            wanted = expected.get(tied.get(name, name))
            if wanted is None:
                problems.append(f"unexpected {name} {list(shape)}")
            elif shape != wanted:
                problems.append(f"{name} is {list(shape)} and should be {list(wanted)}")
            elif dtype not in _FLOATS:
                problems.append(f"{name} is {dtype} and should be one of {', '.join(sorted(_FLOATS))}")
        if not problems:
            # Some writers store a tied output layer too. It may be left out only because it says nothing new.
            problems = [
                f"{copy} differs from {original}, and config.json ties them"
                for copy, original in tied.items()
                if copy in self._file_of and not self._equal(copy, original)
            ]
        if problems:
            raise MegagentError(
                f"{self.folder}: the weights are not those of the {family.name} model in config.json; take both from "
                "one model:" + "".join(f"\n  {problem}" for problem in problems)
            )

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
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


def _assemble(shard: Tensor, layouts: Sequence[LocalTensor], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Full Hugging Face tensors on tensor-parallel rank 0, nothing elsewhere. Collective over its group."""
    if all(layout.boxes == layouts[0].boxes for layout in layouts):
        shards = [shard] if parallel_state.get_tensor_model_parallel_rank() == 0 else []  # every rank holds the same
    else:
        group = parallel_state.get_tensor_model_parallel_group()
        shards = [torch.empty_like(shard) for _ in layouts] if group.rank() == 0 else []
        dist.gather(shard.contiguous(), shards or None, group=group, group_dst=0)
    if not shards:
        return {}
    full = {name: shard.new_empty(shape) for name, shape in shapes.items()}
    for part, layout in zip(shards, layouts, strict=False):
        for box in layout.boxes:
            full[box.hf][box.hf_slices].copy_(part[box.local_slices])
    return full


def _stage_of(parameters: Mapping[str, Tensor], family: Family, hf_config: Mapping[str, Any]) -> dict[str, int]:
    """Pipeline stage of every Megatron tensor of the model. Collective over the pipeline stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    held: list[Any] = [None] * group.size()
    if group.size() == 1:
        held = [list(parameters)]
    else:
        dist.all_gather_object(held, list(parameters), group=group)
    stage_of = {name: stage for stage, names in enumerate(held) for name in names}
    missing = [name for name in family.megatron_names(hf_config) if name not in stage_of]
    if missing:
        raise MegagentError(
            f"no pipeline stage holds {', '.join(missing)}; build the stages from the config that is exported"
        )
    return stage_of


def _global_name(local_name: str, numbers: Sequence[int]) -> str:
    prefix = "decoder.layers."
    if not local_name.startswith(prefix):
        return local_name
    position, rest = local_name.removeprefix(prefix).split(".", 1)
    return f"{prefix}{numbers[int(position)]}.{rest}"


def _replica() -> int:
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def _tensor_ranks() -> tuple[int, int]:
    """(number of tensor-parallel ranks, this one)."""
    group = parallel_state.get_tensor_model_parallel_group()
    return group.size(), group.rank()


def _dtype_and_device(parameters: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    one = next(iter(parameters.values()))
    return one.dtype, one.device
