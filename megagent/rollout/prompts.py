"""What an agent reads before it acts: prompt styles, and the builder that turns one into token ids.

A style is a function of the observation and the remembered steps; `PROMPTS` names them. Adding one is one function and
one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from megagent.config import EnvConfig, RolloutConfig
from megagent.envs.base import Observation
from megagent.envs.webshop.pages import SEPARATOR, segments_of
from megagent.errors import ConfigError, MegagentError
from megagent.rollout.memory import History

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_CHARACTERS = 16  # of a page for each token of the limit; no more is looked at, should the page be a megabyte


def webshop(observation: Observation, history: History) -> str:
    """The seed recipe's prompt: role, task, last steps, page, admissible actions, and the form of the reply."""
    actions = "\n".join(f"'{action}'," for action in observation.admissible)
    steps = history.last()
    if steps:
        first = history.taken - len(steps) + 1
        lines = "\n".join(
            f"[Observation {number}: '{step.page}', Action {number}: '{step.action}']"
            for number, step in enumerate(steps, start=first)
        )
        past = (
            f"So far you have taken {history.taken} step(s). The most recent {len(steps)} observation(s) and the "
            f"action(s) you took on them:\n{lines}\n"
            f"You are now at step {history.taken + 1}. "
        )
    else:
        past = ""
    return (
        "\nYou are an expert agent that shops on its own in the WebShop e-commerce environment.\n"
        f"Your task is: {observation.task}.\n"
        f"{past}You now see this page: {observation.page}.\n"
        f"The actions you can take here are:\n[\n{actions}\n].\n"
        "\n"
        "Choose one action for this step.\n"
        "First think step by step about the page and the task, inside <think> </think> tags. "
        "Then give exactly one of the actions above, inside <action> </action> tags.\n"
    )


def webshop_compact(observation: Observation, history: History) -> str:
    """A short prompt for tiny models: lower case, admissible actions marked in place on the page, past actions only.

    `click[red]` on the page is both the text "red" and the action that it offers, so each value costs its tokens once
    and is copied into the reply as it stands. Actions that are no text of the page follow it.
    """
    offered = {action.lower(): None for action in observation.admissible}
    segments = []
    for segment in map(str.lower, segments_of(observation.page)):
        action = f"click[{segment}]"
        segments.append(action if action in offered else segment)
        offered.pop(action, None)
    if any(action.startswith("search[") for action in offered):
        # The button named after the box does nothing in WebShop; the box is what the model needs to see.
        segments = [segment for segment in segments if segment not in ("search", "click[search]")]
        offered.pop("click[search]", None)
    page = SEPARATOR.join([*segments, *offered])
    past = "".join(f"{step.action}\n" for step in history.last())
    return f"{observation.task.lower()}\n{past}{page}\n"


def sokoban(observation: Observation, history: History) -> str:
    """The room as it is drawn, what its signs mean, the last moves, and the form of the reply."""
    steps = history.last()
    past = f"Your last moves: {', '.join(step.action for step in steps)}.\n" if steps else ""
    return (
        f"You play Sokoban: {observation.task}.\n"
        "# wall, _ floor, . target, $ box, @ you, * box on a target, + you on a target.\n"
        f"{past}{observation.page}\n"
        f"Move {', '.join(observation.admissible)}. "
        "Think inside <think> </think> tags, then give one move inside <action> </action> tags.\n"
    )


PromptStyle = Callable[[Observation, History], str]

PROMPTS: Mapping[str, PromptStyle] = MappingProxyType(
    {"webshop": webshop, "webshop_compact": webshop_compact, "sokoban": sokoban}
)


def prompt_style(env: EnvConfig) -> PromptStyle:
    """The style that env.prompt names. Raises ConfigError if there is none of that name."""
    if env.prompt not in PROMPTS:
        raise ConfigError([f"env.prompt={env.prompt}: no such prompt style; use one of {', '.join(PROMPTS)}"])
    return PROMPTS[env.prompt]


class PromptBuilder:
    """Turns an observation and a history into the token ids that the engine reads.

    Raises ConfigError when env.prompt names no style.
    """

    cut = 0  # prompts whose page or actions were cut, so far

    def __init__(self, env: EnvConfig, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._style = prompt_style(env)
        self._limit = rollout.max_prompt_tokens
        self._tokenizer = tokenizer
        self._uses_chat = bool(getattr(tokenizer, "chat_template", None))

    def build(self, observation: Observation, history: History) -> list[int]:
        """Token ids of the prompt, at most rollout.max_prompt_tokens of them.

        One that is too long loses its history, and if that is not enough, the end of its page and then of its list of
        actions, which can be taken all the same; `cut` counts these. Raises MegagentError if the task alone is longer.
        """
        token_ids = self._ids(observation, history)
        if len(token_ids) > self._limit and history.last():
            token_ids = self._ids(observation)
        if len(token_ids) > self._limit:
            self.cut += 1
            token_ids = self._shortened(observation)
        return token_ids

    def require_fit(self, observation: Observation) -> None:
        """Raises MegagentError if the prompt is too long without history."""
        tokens = len(self._ids(observation))
        if tokens > self._limit:
            raise MegagentError(
                f"a prompt of {tokens} tokens (without history) is longer than rollout.max_prompt_tokens="
                f"{self._limit}. Set rollout.max_prompt_tokens={tokens} or more, or show fewer products on a "
                "page (env.page_size)."
            )

    def _shortened(self, observation: Observation) -> list[int]:
        """The prompt with as many of its actions as fit, and then as much of its page."""
        task = replace(observation, page="", admissible=())
        self.require_fit(task)
        actions = observation.admissible
        fits = self._most(len(actions), lambda count: replace(task, admissible=actions[:count]))
        listed = replace(task, admissible=actions[:fits])
        page = observation.page[: _MOST_CHARACTERS * self._limit]
        fits = self._most(len(page), lambda count: replace(listed, page=page[:count]))
        return self._ids(replace(listed, page=page[:fits]))

    def _most(self, most: int, made: Callable[[int], Observation]) -> int:
        """The largest number up to `most` whose prompt fits, by bisection; that of 0 is known to fit."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._ids(made(middle))) <= self._limit:
                low = middle
            else:
                high = middle - 1
        return low

    def _ids(self, observation: Observation, history: History | None = None) -> list[int]:
        return self.encode(self._style(observation, history or History(0)))

    def encode(self, text: str) -> list[int]:
        """Token ids of one user message, through the chat template if the tokenizer has one."""
        if self._uses_chat:
            message = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))
