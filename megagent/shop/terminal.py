"""How a visit looks in a terminal. Everything goes through rich's Text: no markup of a stranger is read as ours."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megagent.envs.webshop.pages import segments_of
from megagent.observe.episodes import RecordedEpisode, RecordedStep
from megagent.shop.page import Button
from megagent.shop.text import visible
from megagent.shop.visit import Outcome, Visit

LATEST_MOVES = 5  # shown with the page


def task_panel(visit: Visit, panel: str, tasks: int) -> RenderableType:
    return Panel(
        Text(visible(visit.instruction)),
        title=Text(f"Your task ({panel} panel, {visit.number} of {tasks})"),
        title_align="left",
        border_style="cyan",
    )


def page_panel(visit: Visit) -> RenderableType:
    """The open page with every button numbered, and the latest moves below it."""
    page = visit.page
    numbers = {id(button): number for number, button in enumerate(page.in_order(), start=1)}
    parts: list[RenderableType] = [Text(page.heading, style="bold")]
    if page.buttons:
        parts.append(Text("  ").join(_button(button, numbers[id(button)]) for button in page.buttons))
    parts += [Text(text) for text in page.texts]
    if page.offers:
        offers = Table.grid(padding=(0, 2))
        for offer in page.offers:
            button = _button(offer.button, numbers[id(offer.button)])
            offers.add_row(button, Text(offer.title), Text(offer.price, style="green"))
        parts.append(offers)
    for row in page.options:
        buttons = Text("  ").join(_button(button, numbers[id(button)]) for button in row.buttons)
        parts.append(Text.assemble((f"{row.name}: ", "italic"), buttons))
    if page.has_search_box:
        parts.append(Text("Type what you are looking for.", style="dim"))
    return Panel(Group(*parts), title=Text(f"Shop, {_steps(visit)}"), title_align="left", subtitle=_latest(visit))


def observation_panel(visit: Visit) -> RenderableType:
    """The page as an agent reads it, and the actions it is offered."""
    actions = "\n".join(visit.observation.admissible)
    parts = [Text(visible(visit.observation.page)), Text("admissible actions", style="italic"), Text(visible(actions))]
    return Panel(Group(*parts), title=Text("What an agent reads"), title_align="left", border_style="magenta")


def history_table(visit: Visit) -> RenderableType:
    table = Table("step", "action", "", title="What you did", title_justify="left", box=None)
    first = visit.steps - len(visit.moves) + 1
    for number, move in enumerate(visit.moves, start=first):
        remark = "" if move.admissible else "not offered by the page"
        table.add_row(str(number), Text(visible(move.action)), Text(remark, style="yellow"))
    return table


def outcome_panel(outcome: Outcome) -> RenderableType:
    """The score, each component of it explained."""
    table = Table("component", "met", "of the score", "why", box=None)
    for part in outcome.parts:
        share = "" if part.share is None else f"{part.share:.3f}"
        table.add_row(part.component, part.met, share, Text(visible(part.sentence)))
    verdict = "won: all that was asked for" if outcome.won else "not won: a win takes the whole score"
    style = "bold green" if outcome.won else "bold yellow"
    heading = Text(f"Score {outcome.score:.3f} of 1 ({verdict})", style=style)
    return Panel(Group(heading, table), title=Text("Your purchase"), title_align="left", border_style=style.split()[-1])


def recorded_step(episode: RecordedEpisode, step: RecordedStep) -> RenderableType:
    """What the agent read, wrote and did."""
    clicked = step.action.removeprefix("click[").removesuffix("]")
    page = Text()
    for segment in segments_of(step.page):
        style = "reverse" if segment.lower() == clicked else ""
        page.append(visible(segment), style=style).append("\n")
    page.rstrip()
    action = Text.assemble(("action  ", "dim"), (visible(step.action), "bold yellow" if step.fault else "bold"))
    if step.fault:
        action.append(f"  ({step.fault})", style="yellow")
    if step.reward:
        action.append(f"  reward {step.reward:g}", style="green")
    reply = Text.assemble(("reply   ", "dim"), visible(step.response))
    title = Text(f"Step {step.number + 1} of {len(episode.steps)}")
    return Panel(Group(page, Text(), reply, action), title=title, title_align="left")


def recorded_head(episode: RecordedEpisode, number: int, episodes: int) -> RenderableType:
    title = Text(f"Episode {number} of {episodes}")
    return Panel(Text(visible(episode.instruction)), title=title, title_align="left", border_style="cyan")


def recorded_end(episode: RecordedEpisode) -> RenderableType:
    style = "bold green" if episode.won else "bold yellow"
    return Text(episode.verdict, style=style)


def say(console: Console, text: str, style: str = "dim") -> None:
    console.print(Text(visible(text), style=style))


def _steps(visit: Visit) -> str:
    over = ", which have run out" if visit.steps >= visit.max_steps and visit.outcome is None else ""
    return f"step {visit.steps + (visit.outcome is None)} (an agent has {visit.max_steps}{over})"


def _latest(visit: Visit) -> Text | None:
    moves = list(visit.moves)[-LATEST_MOVES:]
    if not moves:
        return None
    dots = "... " if visit.steps > len(moves) else ""
    return Text(visible(dots + " > ".join(move.action for move in moves)), overflow="ellipsis", no_wrap=True)


def _button(button: Button, number: int) -> Text:
    label = Text.assemble((f"[{number}]\u00a0", "cyan"), button.label)
    if button.selected:
        label.append(" *selected*", style="bold green")
    return label
