"""What the web page asks for: visits, or recorded episodes. JSON values in, JSON values out; no HTTP here."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from megagent.envs.webshop.pages import segments_of
from megagent.errors import MegagentError
from megagent.observe.episodes import RecordedEpisode
from megagent.shop.text import all_visible, visible
from megagent.shop.visit import OpenShop, Visit

MOST_VISITS = 256  # kept at once; the one unused for longest gives way


class Refused(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Site(Protocol):
    """Answers the requests below /api/."""

    def get(self, path: Sequence[str]) -> Any:
        """path: the parts after /api/. Raises Refused."""
        ...

    def post(self, path: Sequence[str], body: dict[str, Any]) -> Any:
        """Raises Refused."""
        ...


class ShopSite:
    """Visits of any number of tabs, each known by a name that cannot be guessed."""

    def __init__(self, shop: OpenShop, most_visits: int = MOST_VISITS) -> None:
        self._shop = shop
        self._most_visits = most_visits
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        # Requests come in threads. A step takes a millisecond, so one lock for the whole shop holds nobody up.
        self._lock = threading.Lock()

    def get(self, path: Sequence[str]) -> Any:
        """site -> which site this is; visits/NAME -> a visit as it stands."""
        match path:
            case ["site"]:
                return {"kind": "shop", "panel": self._shop.panel, "tasks": len(self._shop)}
            case ["visits", name]:
                with self._lock:
                    return self._shown(name, self._visit(name))
        raise Refused(404, "no such thing")

    def post(self, path: Sequence[str], body: dict[str, Any]) -> Any:
        """visits {task} -> a new visit; visits/NAME/actions {action: text} -> the visit after it."""
        match path:
            case ["visits"]:
                task = body.get("task", "first")
                if set(body) - {"task"} or (task not in ("first", "another") and type(task) is not int):
                    raise Refused(400, 'a visit is asked for with {"task": "first", "another" or a number}')
                with self._lock:
                    return self._start(task)
            case ["visits", name, "actions"]:
                action = body.get("action")
                if set(body) != {"action"} or not isinstance(action, str):
                    raise Refused(400, 'an action is sent as {"action": "search[...] or click[...]"}')
                with self._lock:
                    visit = self._visit(name)
                    try:
                        visit.act(action)
                    except MegagentError as error:
                        raise Refused(409, str(error)) from None
                    return self._shown(name, visit)
        raise Refused(404, "no such thing")

    def _start(self, task: str | int) -> Any:
        try:
            if isinstance(task, int):
                visit = self._shop.visit(task)
            else:
                visit = self._shop.first() if task == "first" else self._shop.another()
        except MegagentError as error:
            raise Refused(400, str(error)) from None
        name = secrets.token_urlsafe(16)
        self._visits[name] = visit
        if len(self._visits) > self._most_visits:
            self._visits.popitem(last=False)
        return self._shown(name, visit)

    def _visit(self, name: str) -> Visit:
        if name not in self._visits:
            raise Refused(
                404, f"this visit is over: the shop has started anew, or {self._most_visits} others came after"
            )
        self._visits.move_to_end(name)
        return self._visits[name]

    def _shown(self, name: str, visit: Visit) -> dict[str, Any]:
        return {
            "visit": name,
            "number": visit.number,
            "task": visible(visit.instruction),
            "steps": visit.steps,
            "max_steps": visit.max_steps,
            "page": asdict(visit.page),
            "observation": visible(visit.observation.page),
            "admissible": all_visible(visit.observation.admissible),
            "moves": [{"action": visible(move.action), "admissible": move.admissible} for move in visit.moves],
            "outcome": _outcome(visit),
        }


class ReplaySite:
    """Recorded episodes, to be looked at only."""

    def __init__(self, episodes: Sequence[RecordedEpisode], title: str) -> None:
        """title: of the page, for instance the file's name."""
        self._episodes = episodes
        self._title = visible(title)

    def get(self, path: Sequence[str]) -> Any:
        """site -> which site this is, with a line for each episode; episodes/NUMBER -> one of them, from 0."""
        match path:
            case ["site"]:
                episodes = [{"instruction": visible(e.instruction), "won": e.won} for e in self._episodes]
                return {"kind": "replay", "title": self._title, "episodes": episodes}
            case ["episodes", number] if number.isascii() and number.isdigit() and int(number) < len(self._episodes):
                return self._shown(self._episodes[int(number)])
        raise Refused(404, "no such thing")

    def post(self, path: Sequence[str], body: dict[str, Any]) -> Any:
        raise Refused(405, "recorded episodes are only shown")

    @staticmethod
    def _shown(episode: RecordedEpisode) -> Any:
        record = asdict(episode) | {"verdict": episode.verdict}
        for step, shown in zip(episode.steps, record["steps"], strict=True):
            shown |= {"segments": segments_of(step.page), "fault": step.fault}
        return all_visible(record)


def _outcome(visit: Visit) -> dict[str, Any] | None:
    if visit.outcome is None:
        return None
    parts = all_visible([asdict(part) for part in visit.outcome.parts])
    return {"score": visit.outcome.score, "won": visit.outcome.won, "parts": parts}
