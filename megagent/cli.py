"""The command line. Nothing heavy is imported before a command is known to be sound."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from megagent import __version__
from megagent.config import as_yaml
from megagent.errors import ConfigError, MegagentError
from megagent.parallel.convert import command as convert
from megagent.shop import command as shop

OVERRIDES = "key=value, or group=choice for a file of configs/: experiment=webshop_tiny, trainer.lr=4e-4"
# What training needs and `pip install megagent` alone does not bring.
EXTRAS = ("torch", "ray", "transformers", "safetensors", "tokenizers", "megatron", "vllm", "tensorboard", "psutil")
EXAMPLES = """examples:
  megagent train experiment=webshop_tiny                     teach a tiny agent to shop, on two CPU cores
  megagent train experiment=webshop_tiny parallel=tp2_pp2 rollout.tp=2
  megagent train experiment=webshop_gigpo_7b --dry-run       check it and see its batch table, without a GPU
  megagent train experiment=webshop_tiny trainer.lr=4e-4 --cfg
  megagent sft experiment=webshop_tiny sft.output=warm       make the tiny agent's warm start
  megagent shop play                                         shop yourself, in the terminal
  megagent convert hf-to-megatron Qwen2.5-7B qwen7b --tp 4   a checkpoint that Megatron-LM loads, and back
  megagent doctor                                            what is installed, and what runs here
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 2 for something the user can put right, 130 after Ctrl-C."""
    try:
        parser = _parser()
        # argparse takes positional arguments in one piece only; those after an option are overrides all the same.
        chosen, rest = parser.parse_known_args(arguments)
        if chosen.command is None:
            parser.print_help()
            return 0
        overrides = [*getattr(chosen, "overrides", []), *rest]
        if chosen.command == "convert":
            signal.signal(signal.SIGTERM, _terminated)
            return convert.run(chosen, rest)
        _refuse_options(overrides)
        if chosen.command == "doctor":
            return _doctor(overrides)
        if chosen.command == "shop":
            return _shop(chosen, overrides)
        return _run(chosen, overrides)
    except MegagentError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megagent: interrupted", file=sys.stderr)
        return 128 + (signal.SIGTERM if _termination else signal.SIGINT)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        print(f"megagent: {error.name} is not installed; install megagent[cpu] or megagent[gpu].", file=sys.stderr)
        return 2
    except BrokenPipeError:  # megagent train --cfg | head
        _forget_output()
        return 141


def _run(chosen: argparse.Namespace, overrides: list[str]) -> int:
    from megagent.config_load import load, read

    if chosen.cfg:
        config, faults = read(overrides)
        faults.report()
        print(as_yaml(config), end="")
        return 0
    if chosen.dry_run:
        from megagent.observe.plan import print_plan

        print_plan(load(overrides))
        return 0
    config = load(overrides, chosen.command)
    signal.signal(signal.SIGTERM, _terminated)
    module = importlib.import_module(f"megagent.{chosen.command}")
    module.main(config)
    return 0


_termination = False  # whether the interrupt under way is a SIGTERM


def _terminated(number: int, frame: object) -> None:
    # Handed on as SIGINT: an event loop that is running cancels its tasks for that one, and for no other.
    global _termination
    _termination = True
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script started the command with &
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _forget_output() -> None:
    """Standard output goes nowhere from now on: what is left in its buffer would fail once more at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _doctor(overrides: Sequence[str]) -> int:
    if overrides:
        raise ConfigError([f"{overrides[0]}: megagent doctor takes no arguments"], source="command line")
    from megagent.observe.doctor import print_report

    print_report()
    return 0


def _shop(chosen: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise ConfigError([f"{text}: megagent shop takes no overrides; see --help" for text in rest], "command line")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        status = shop.run(chosen)
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _forget_output()
        raise MegagentError(f"megagent: the output cannot be written ({error.strerror}); make room for it") from None
    return status


def _refuse_options(overrides: Sequence[str]) -> None:
    """An override written as an option (--trainer.lr=1) gets the same kind of answer as any other slip."""
    problems = [
        f"{text}: there is no such option; an override is written without dashes ({text.lstrip('-')})"
        for text in overrides
        if text.startswith("-")
    ]
    if problems:
        raise ConfigError(problems, source="command line")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megagent",
        description="Reinforcement learning for multi-turn LLM agents at Megatron scale.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megagent {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, summary in (
        ("train", "train an agent: rollout, advantages, update, weight sync, validation"),
        ("sft", "warm-start a model on scripted episodes, and write it as a Hugging Face folder"),
    ):
        trains = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        trains.add_argument("overrides", nargs="*", metavar="override", help=OVERRIDES)
        trains.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
        trains.add_argument(
            "--dry-run", action="store_true", help="check the configuration, print its layout and batch table, and stop"
        )
    shop.add_parser(commands)
    convert.add_to(commands)
    summary = "show versions, the platform and kernels in use, memory and cores"
    commands.add_parser("doctor", help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
