"""A score in words."""

from __future__ import annotations

from dataclasses import dataclass

from megagent.envs.webshop.reward import Reward


@dataclass(frozen=True, slots=True)
class Part:
    """One component of a score."""

    component: str
    met: str
    share: float  # of the score
    sentence: str


def explain(reward: Reward) -> list[Part]:
    """The components that make up the score, each with its part of it; the parts add up to the score."""
    attributes, options, price = reward.weights
    parts = [
        Part("attributes", f"{reward.attributes:.0%}", reward.kind * attributes * reward.attributes, "asked attributes")
    ]
    if reward.options is not None:
        parts.append(Part("options", f"{reward.options:.0%}", reward.kind * options * reward.options, "asked options"))
    parts.append(Part("price", "yes" if reward.price else "no", reward.kind * price * reward.price, "within the bound"))
    return parts
