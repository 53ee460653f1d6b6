"""Where the shop differs from the original WebShop, one named rule each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """The behaviour of a shop. The fields' defaults are the honest ones; `ORIGINAL` is the WebShop of the papers."""

    # An asked option counts if the value bought under that name is the asked one. The original compares the text
    # "name value" with any bought value fuzzily: wrong sizes count, and some colours cannot be satisfied at all.
    options_by_name: bool = True
    # The item page says what is selected. In the original's text mode it is the same before and after a click.
    shows_selection: bool = True
    # A value that two options share, or that is also the text of a button, is offered as "name: value". In the
    # original such a click always means the button, or the last option with the value.
    tells_values_apart: bool = True


HONEST = Rules()
ORIGINAL = Rules(options_by_name=False, shows_selection=False, tells_values_apart=False)
