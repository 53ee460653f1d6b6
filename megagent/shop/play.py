"""`megagent shop play`: a visit in the terminal, typed or piped."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console

from megagent.errors import MegagentError
from megagent.shop import terminal
from megagent.shop.visit import OpenShop, ShopOptions, Visit, open_shop

HELP = """a number clicks the button of that number; so does the text of a button
other words on a page with a search box search for them
search[...] and click[...] are taken as an agent's action, whatever the page
:history  what you did      :observation  what an agent reads here, and what it may do
:task     the task again    :new  another task      :quit  leave"""

AFTERWARDS = "This visit has ended: Enter shops another task, :history shows what you did, :quit leaves."

_ACTION = re.compile(r"(search|click)\[.*\]", re.IGNORECASE)

# Gives the next line without its end. Raises EOFError when there are no more.
Reader = Callable[[], str]


def main(options: ShopOptions) -> None:
    """Plays until the visitor leaves: by :quit, the end of the input, or Ctrl-C.

    Raises ConfigError and CatalogError before anything is shown.
    """
    shop = open_shop(options)
    console = Console(highlight=False, file=sys.stdout)
    try:
        play(shop, console, _typed if sys.stdin.isatty() else _piped(console))
    except (EOFError, KeyboardInterrupt):
        console.print()
        terminal.say(console, "Goodbye.")


def play(shop: OpenShop, console: Console, read: Reader) -> None:
    """Visit after visit, until `:quit`. Raises EOFError where `read` does."""
    terminal.say(console, f"{len(shop)} tasks in the {shop.panel} panel. Type :help for what can be typed.")
    visit = shop.first()
    while _shopped(visit, shop, console, read):
        visit = shop.another()


def _shopped(visit: Visit, shop: OpenShop, console: Console, read: Reader) -> bool:
    """One visit, and what is asked about it afterwards. False: the visitor left."""
    console.print(terminal.task_panel(visit, shop.panel, len(shop)))
    console.print(terminal.page_panel(visit))
    while True:
        line = read().strip()
        if line == ":quit":
            if visit.outcome is None:
                terminal.say(console, "You left without buying anything.")
            return False
        if line == ":new" or (line == "" and visit.outcome is not None):
            return True
        if line.startswith(":"):
            _tell(line, visit, shop, console)
        elif visit.outcome is not None:
            terminal.say(console, AFTERWARDS, "yellow")
        elif line:
            _act(line, visit, console)


def _tell(command: str, visit: Visit, shop: OpenShop, console: Console) -> None:
    if command == ":history":
        console.print(terminal.history_table(visit))
    elif command == ":task":
        console.print(terminal.task_panel(visit, shop.panel, len(shop)))
    elif command == ":observation":
        console.print(terminal.observation_panel(visit))
    elif command == ":help":
        terminal.say(console, HELP, style="")
    else:
        terminal.say(console, f"{command}: no such command; type :help for those there are.", "yellow")


def _act(line: str, visit: Visit, console: Console) -> None:
    action = action_of(line, visit)
    if action is None:
        terminal.say(console, f"{line}: not on this page; type :help for what can be typed.", "yellow")
        return
    try:
        move = visit.act(action)
    except MegagentError as error:
        terminal.say(console, str(error), "yellow")
        return
    if not move.admissible:
        terminal.say(console, f"{action}: the page does not offer this.", "yellow")
    console.print(terminal.page_panel(visit))
    if visit.outcome is not None:
        console.print(terminal.outcome_panel(visit.outcome))
        terminal.say(console, AFTERWARDS)


def action_of(line: str, visit: Visit) -> str | None:
    """The action that a typed line means on the open page, or None."""
    buttons = visit.page.in_order()
    if line.isascii() and line.isdigit() and len(line) <= 4 and 1 <= int(line) <= len(buttons):
        return buttons[int(line) - 1].action
    for button in buttons:
        if line.lower() in (button.label.lower(), button.action):
            return button.action
    if _ACTION.fullmatch(line):
        return line
    return f"search[{line}]" if visit.page.has_search_box else None


def _typed() -> str:
    with suppress(ImportError):
        import readline  # noqa: F401  (once imported, input() can be edited and has a history)
    return input("> ")


def _piped(console: Console) -> Reader:
    def read() -> str:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise MegagentError(f"the piped input is not UTF-8 text ({error.reason})") from None
        if not line:
            raise EOFError
        terminal.say(console, f"> {line.rstrip()}", style="bold")  # a terminal would have shown it
        return line

    return read
