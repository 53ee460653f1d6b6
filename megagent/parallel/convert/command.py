"""`megagent convert`: what it can be asked, and what it says. Nothing heavy is imported before a question is sound."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megagent.errors import ConfigError, MegagentError
from megagent.parallel.degrees import Degrees

if TYPE_CHECKING:
    from megagent.parallel.convert.conversion import Options

SUMMARY = "convert, compare and look into checkpoints: Hugging Face folders and Megatron's distributed ones"
EXAMPLES = """examples:
  megagent convert hf-to-megatron Qwen2.5-7B qwen7b-megatron --tp 4 --workers 4
  megagent convert megatron-to-hf qwen7b-megatron qwen7b-hf --dtype bf16
  megagent convert megatron-to-hf runs/shop/checkpoints trained-hf --model Qwen2.5-7B
  megagent convert verify Qwen2.5-7B qwen7b-megatron
  megagent convert inspect qwen7b-megatron --digests
"""
_DEGREES = {
    "tp": "tensor parallel (default: 1)",
    "pp": "pipeline stages (default: 1)",
    "vpp": "chunks of a stage (default: 1)",
    "ep": "expert parallel (default: 1)",
    "etp": "tensor parallel within experts (default: as tp)",
}
_DTYPES = ("bf16", "fp16", "fp32")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|KB|MB|GB|B)?", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand and its own subcommands."""
    parser = commands.add_parser(
        "convert",
        help=SUMMARY,
        description=SUMMARY[0].upper() + SUMMARY[1:] + ".",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    there = _action(actions, "hf-to-megatron", "a Hugging Face folder as a distributed checkpoint (torch_dist)")
    there.add_argument("source", type=Path, metavar="SRC")
    there.add_argument("out", type=Path, metavar="OUT", help="new folder, what Megatron-LM takes as --load")
    degrees = there.add_argument_group(
        "loading",
        "degrees of the run that will load it: checked, and the vocabulary padded for tp; any others load it too",
    )
    for name, what in _DEGREES.items():
        degrees.add_argument(f"--{name}", type=int, default=None if name == "etp" else 1, metavar="N", help=what)
    _converting(there)
    back = _action(actions, "megatron-to-hf", "a distributed checkpoint as a Hugging Face folder")
    back.add_argument("source", type=Path, metavar="SRC", help="of Megatron-LM, a conversion or a training run")
    back.add_argument("out", type=Path, metavar="OUT", help="new folder: weights, config.json, tokenizer")
    _model(back)
    _converting(back)
    verify = _action(actions, "verify", "whether two checkpoints of any kind hold the same, tensor by tensor")
    verify.add_argument("source", type=Path, metavar="A")
    verify.add_argument("other", type=Path, metavar="B")
    verify.add_argument("--logits", action="store_true", help="also run both (transformers, Megatron) and compare")
    _model(verify)
    inspect = _action(actions, "inspect", "what is in a checkpoint: family, parameters, dtypes, layout")
    inspect.add_argument("source", type=Path, metavar="X")
    inspect.add_argument("--digests", action="store_true", help="read it all: SHA-256 of every tensor and of the model")
    _model(inspect)


def run(chosen: argparse.Namespace, rest: Sequence[str]) -> int:
    """Do what was asked. Returns the exit status: 0, or 1 if checkpoints that were compared differ.

    Raises MegagentError for everything that the user can put right.
    """
    if rest:
        raise ConfigError([f"{text}: megagent convert has no such option" for text in rest], source="command line")
    actions = {"hf-to-megatron": _there, "megatron-to-hf": _back, "verify": _verify, "inspect": _inspect}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of folders may be any bytes
    try:
        status = actions[chosen.action](chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # megagent convert inspect --digests | head
        raise
    except OSError as error:
        _forget_output()
        raise MegagentError(f"megagent convert: {error}; put it right and start again") from error
    except MemoryError:
        raise MegagentError("megagent convert: out of memory; end what else is running and start again") from None
    return status


def _forget_output() -> None:
    """What standard output did not take would fail once more at the exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _there(chosen: argparse.Namespace) -> int:
    shard_bytes = _bytes(chosen.shard_size)
    from megagent.parallel.convert import conversion

    degrees = Degrees(
        tp=chosen.tp, pp=chosen.pp, vpp=chosen.vpp, ep=chosen.ep, etp=chosen.etp, dp=chosen.ep * (chosen.etp or 1)
    )
    folder = conversion.to_megatron(chosen.source, chosen.out, degrees, _options(chosen, shard_bytes))
    print(f"{folder} is complete; Megatron-LM: --load {chosen.out} --ckpt-format torch_dist")
    return 0


def _back(chosen: argparse.Namespace) -> int:
    shard_bytes = _bytes(chosen.shard_size)
    from megagent.parallel.convert import conversion

    folder = conversion.to_hf(chosen.source, chosen.out, chosen.model, _options(chosen, shard_bytes))
    print(f"{folder} is complete")
    return 0


def _verify(chosen: argparse.Namespace) -> int:
    from megagent.parallel.convert import compare, conversion

    one, other = (conversion.open_any(path, chosen.model) for path in (chosen.source, chosen.other))
    found = compare.compare(one, other)
    for line in found.differing:
        print(line)
    if found.rounded:
        print(f"{len(found.rounded)} of {found.tensors} tensors are equal but for the rounding of their dtype")
    if found.differing:
        print(f"DIFFERENT: {len(found.differing)} of {found.tensors} tensors")
        return 1
    print(f"EQUAL: {found.tensors} tensors, {one.parameters:,} parameters")
    if not chosen.logits:
        return 0
    from megagent.parallel.convert import logits

    apart = logits.largest_difference(one, other)
    close = apart <= (logits.ROUNDED if found.rounded else logits.TOLERANCE)  # not so if they are no numbers
    print(f"logits: {apart:.1e} apart, relative to the largest ({'as rounding makes them' if close else 'DIFFERENT'})")
    return 0 if close else 1


def _inspect(chosen: argparse.Namespace) -> int:
    from megagent.parallel.convert import compare, conversion

    stored = conversion.open_any(chosen.source, chosen.model)
    for name, value in compare.describe(stored):
        print(f"{name:<12} {value}")
    if chosen.digests:
        found = compare.digests(stored)
        for name, digest in found.items():
            print(f"{digest}  {name}")
        print(f"{'digest':<12} {compare.digest_of(stored, found)}")
    return 0


def _options(chosen: argparse.Namespace, shard_bytes: int) -> Options:
    from megagent.parallel.convert.conversion import Options

    return Options(
        dtype=chosen.dtype,
        workers=chosen.workers,
        resume=chosen.resume,
        overwrite=chosen.overwrite,
        sync=chosen.sync,
        shard_bytes=shard_bytes,
    )


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    return actions.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="HF", help="Hugging Face folder of a Megatron checkpoint that has no hf/ inside"
    )


def _converting(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--dtype", choices=_DTYPES, help="cast the weights (default: as they are)")
    parser.add_argument(
        "--workers", type=int, default=min(4, cores), metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument("--shard-size", default="4GiB", metavar="SIZE", help="bytes of a file (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where a conversion that was killed ended")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a checkpoint")
    parser.add_argument("--sync", action="store_true", help="wait for the disk before OUT gets its name")


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = round(float(match[1]) * _UNITS[(match[2] or "B").lower()]) if match else 0
    if size < 1:
        raise MegagentError(f"--shard-size={text}: give a number of bytes, such as 4GiB or 500MB")
    return size
