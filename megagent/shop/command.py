"""`megagent shop build | play | serve | replay`: their arguments. What they need is imported when they run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

PORT = 8765


def add_parser(commands: Any) -> None:
    """Adds `shop` and its verbs to the parsers of the command line."""
    shop = _parser(commands, "shop", "build a catalogue, shop in it yourself, or look at recorded episodes")
    shop.set_defaults(explain=shop.print_help, verb=None)
    verbs = shop.add_subparsers(dest="verb", metavar="verb")

    build = _parser(verbs, "build", "write a compact catalogue file with its search index")
    build.add_argument("source", help="a folder with the original's files, or embedded")
    build.add_argument("output", type=Path, help="the .shop file")
    build.add_argument("--skip-bad", action="store_true", help="leave out products with faults, and count them")
    build.add_argument("--overwrite", action="store_true", help="replace a .shop file that is there")

    play = _parser(verbs, "play", "shop in the terminal, by typing; input may be piped")
    _add_shop_options(play)

    serve = _parser(verbs, "serve", "shop in the browser, beside what the agent reads")
    _add_shop_options(serve)
    _add_address(serve)

    replay = _parser(verbs, "replay", "show the episodes that a run has recorded")
    replay.add_argument("episodes", type=Path, help="a file of a run's episodes folder, for instance of runs/NAME")
    replay.add_argument("--episode", type=int, metavar="N", help="only this one, counted from 1")
    replay.add_argument("--web", action="store_true", help="in the browser, instead of the terminal")
    _add_address(replay)


def run(chosen: argparse.Namespace) -> int:
    """Runs a verb. Returns the exit status. Raises MegagentError."""
    if chosen.verb is None:
        chosen.explain()
    elif chosen.verb == "build":
        from megagent.shop.build import run as build

        build(chosen.source, chosen.output, skip_bad=chosen.skip_bad, overwrite=chosen.overwrite)
    elif chosen.verb == "replay":
        if chosen.web:
            from megagent.shop.serve import serve_replay

            serve_replay(chosen.episodes, chosen.episode, chosen.host, chosen.port)
        else:
            from megagent.shop.replay import main as replay

            replay(chosen.episodes, chosen.episode)
    else:
        from megagent.shop.visit import ShopOptions

        options = ShopOptions(**{name: getattr(chosen, name) for name in ShopOptions.__dataclass_fields__})
        if chosen.verb == "serve":
            from megagent.shop.serve import serve_shop

            serve_shop(options, chosen.host, chosen.port)
        else:
            from megagent.shop.play import main as play

            play(options)
    return 0


def _add_shop_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--catalog", default="embedded", metavar="WHERE", help="embedded (default), a folder, or a built .shop file"
    )
    parser.add_argument("--panel", default="train", help="warmup, train (default), validation or test")
    parser.add_argument(
        "--task", type=int, metavar="N", help="place of the first task in its panel, from 0; default: any"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="draws the same tasks every time")
    parser.add_argument("--compat", help="none (default) or verl_agent: the original's behaviour")
    parser.add_argument("--goals", help="synthetic (default) or human")
    parser.add_argument("--observation", help="text (default) or text_rich: how the agent reads a page")


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine's browsers only)"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0 takes any free one")


def _parser(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    return parser
