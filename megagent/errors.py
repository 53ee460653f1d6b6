"""Errors that a user can act on. Their text is shown without a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class MegagentError(Exception):
    """Something that the user can put right: the message names the value, the rule and the fix."""


class ConfigError(MegagentError):
    """One or more faults of a configuration, reported together."""

    def __init__(self, problems: Sequence[str], source: str = "configs") -> None:
        self.problems = tuple(problems)
        self.source = source
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = [f"{source}: {len(self.problems)} {noun}", *(f"  {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...], str]]:
        # By default an exception is rebuilt from its text; this one is made of its problems.
        return type(self), (self.problems, self.source)


class CatalogError(MegagentError):
    """A product catalogue that is missing or malformed."""


class BatchError(MegagentError):
    """Rows that break a rule of the step batch (order, lengths, missing columns)."""


class InfrastructureError(MegagentError):
    """A process, engine or environment failed or missed its deadline. Never to be read as a reward of zero."""


class EpisodeLost(InfrastructureError):
    """The process that played an episode died or went silent. The episode can be played again."""
