"""How fast and how small the shop is, as an environment.

    python -m benchmarks.webshop [--quick] [--catalog FOLDER|FILE.shop]

On the real 1,000 products where MEGAGENT_WEBSHOP_DATA names their folder, with the actions of the golden episodes that
lie beside it; else on the embedded products, with those of the scripted shopper. Each part runs in a process of its own
on one core; times are those of the processor, so that a busy machine does not change them.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import arguments, close

if TYPE_CHECKING:
    from megagent.envs.base import Environment
    from megagent.envs.webshop.world import WebShopWorld

ORIGINAL_STEPS_PER_S = 26  # of the original, with Lucene, on one core
SEED = 0

STEPS_PER_S = 5000
ENVIRONMENT_MS, ENVIRONMENT_KB = 1.0, 100.0
PROCESS_MB = 150.0  # above the interpreter with numpy, with 1,000 environments
GROWTH_MB = 2.0  # over 10,000 episodes; an environment that keeps what it need not keeps kilobytes an episode
MANY = 4096

Actions = list[str]


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--catalog", default=os.environ.get("MEGAGENT_WEBSHOP_DATA", "embedded"))
    parser.add_argument("--part", choices=sorted(PARTS), help="run this part only, in this process")
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options.catalog, options.quick)))
        return 0

    figures: dict[str, float] = {}
    for part in PARTS:
        found = alone(part, options.catalog, options.quick)
        figures |= found
        if not options.json:
            print("  ".join(f"{name} {value:,.2f}" for name, value in found.items()), flush=True)
    figures["process_mb"] = figures["rss_1000_mb"] - figures.pop("rss_numpy_mb")
    figures["times_the_original"] = figures["steps_per_s"] / ORIGINAL_STEPS_PER_S
    bars = {
        f"at least {STEPS_PER_S:,} mixed steps/s on one core": figures["steps_per_s"] >= STEPS_PER_S,
        f"at least {STEPS_PER_S:,} also with compat=verl_agent": figures["compat/steps_per_s"] >= STEPS_PER_S,
        f"a new environment under {ENVIRONMENT_MS:g} ms": figures["environment_ms"] < ENVIRONMENT_MS,
        f"a new environment under {ENVIRONMENT_KB:g} kB": figures["environment_kb"] < ENVIRONMENT_KB,
        f"1,000 environments under {PROCESS_MB:g} MB": figures["process_mb"] < PROCESS_MB,
        f"growth over 10,000 episodes under {GROWTH_MB:g} MB": figures["growth_mb"] < GROWTH_MB,
        f"{MANY:,} environments in Ray actors end their episodes": figures["actors/episodes"] == MANY,
    }
    return close("webshop", figures, bars)


def alone(part: str, catalog: str, quick: bool) -> dict[str, float]:
    """The figures of a part, measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.webshop", "--part", part, "--catalog", catalog]
    answer = subprocess.run([*command, *(["--quick"] if quick else [])], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------------------
# What is played
# ---------------------------------------------------------------------------------------------------------------------


def open_world(catalog: str, compat: str = "none") -> WebShopWorld:
    from megagent.envs.webshop.config import WebShopConfig
    from megagent.envs.webshop.world import build_webshop

    return build_webshop(WebShopConfig(catalog=catalog, compat=compat))


def recorded_actions(catalog: str) -> list[Actions]:
    """The actions of each golden episode, or of scripted ones where there are none."""
    golden = Path(catalog).parent / "golden" / "trajectories_seed0.jsonl.gz"
    if golden.is_file():
        lines = gzip.decompress(golden.read_bytes()).splitlines()
        return [[step["action"] for step in json.loads(line)["steps"] if "action" in step] for line in lines]
    from megagent.envs.webshop.shopper import Mistakes, demonstrations

    world = open_world("embedded")
    episodes = demonstrations(world, world.tasks("train"), 200, Mistakes(), 15, SEED)
    return [[step.action for step in episode.steps] for episode in episodes]


def play(environment: Environment, world: WebShopWorld, scripts: Iterator[tuple[int, Actions]]) -> int:
    """Play the scripts, each with the next task of the train panel; the steps that were taken."""
    tasks = world.tasks("train")
    steps = 0
    for number, actions in scripts:
        environment.reset(tasks[number % len(tasks)])
        for action in actions:
            steps += 1
            if environment.step(action).done:
                break
    return steps


def endless(scripts: Sequence[Actions]) -> Iterator[tuple[int, Actions]]:
    return enumerate(itertools.cycle(scripts))


def rss_mb() -> float:
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------


def numpy_alone(catalog: str, quick: bool) -> dict[str, float]:
    import numpy as np

    np.random.default_rng(SEED).permutation(10)
    return {"rss_numpy_mb": rss_mb()}


def speed(catalog: str, quick: bool, compat: str = "none") -> dict[str, float]:
    """Steps of the recorded actions a second, resets included, after one pass over them."""
    on_one_core()
    world = open_world(catalog, compat)
    scripts = recorded_actions(catalog)
    environment = world.make()
    todo = endless(scripts)
    play(environment, world, itertools.islice(todo, len(scripts)))
    rounds = 1 if quick else 10
    rates = []
    for _ in range(3):
        start = time.process_time()
        steps = play(environment, world, itertools.islice(todo, rounds * len(scripts)))
        rates.append(steps / (time.process_time() - start))
    return {"steps_per_s": sorted(rates)[1]}


def compat_speed(catalog: str, quick: bool) -> dict[str, float]:
    return {f"compat/{name}": value for name, value in speed(catalog, quick, "verl_agent").items()}


def one_environment(catalog: str, quick: bool) -> dict[str, float]:
    """A new environment in the middle of an episode, beyond the first of its process."""
    world = open_world(catalog)
    scripts = [actions[: len(actions) // 2] for actions in recorded_actions(catalog)]
    warm = [world.make() for _ in range(len(scripts))]
    for index, environment in enumerate(warm):
        play(environment, world, iter([(index, scripts[index])]))
    count = 200 if quick else MANY
    tasks = world.tasks("train")
    before, start = rss_mb(), time.process_time()
    environments = [world.make() for _ in range(count)]
    for index, environment in enumerate(environments):
        environment.reset(tasks[index % len(tasks)])
    seconds = time.process_time() - start
    for index, environment in enumerate(environments):
        play(environment, world, iter([(index, scripts[index % len(scripts)])]))
    return {"environment_ms": seconds / count * 1e3, "environment_kb": (rss_mb() - before) * 1024 / count}


def thousand(catalog: str, quick: bool) -> dict[str, float]:
    """A process with 1,000 environments, each in the middle of an episode."""
    start = time.process_time()
    world = open_world(catalog)
    seconds = time.process_time() - start
    scripts = recorded_actions(catalog)
    environments = [world.make() for _ in range(1000)]
    for index, environment in enumerate(environments):
        actions = scripts[index % len(scripts)]
        play(environment, world, iter([(index, actions[: len(actions) // 2])]))
    return {"rss_1000_mb": rss_mb(), "open_s": seconds}


def growth(catalog: str, quick: bool) -> dict[str, float]:
    """What 10,000 episodes in one environment leave behind, once caches are full."""
    world = open_world(catalog)
    environment = world.make()
    todo = endless(recorded_actions(catalog))
    episodes = 1000 if quick else 10_000
    play(environment, world, itertools.islice(todo, max(episodes // 2, 1000)))
    before = rss_mb()
    play(environment, world, itertools.islice(todo, episodes))
    return {"growth_mb": rss_mb() - before}


def actors(catalog: str, quick: bool) -> dict[str, float]:
    """As many episodes at once as a node would play, in Ray actors, each step a message to and fro."""
    from megagent.cluster.environments import EnvironmentGroup
    from megagent.cluster.session import ray_session
    from megagent.config import Config
    from megagent.envs.webshop.config import WebShopConfig

    world = open_world(catalog)
    scripts = recorded_actions(catalog)
    tasks = world.tasks("train")
    with ray_session(Config()):
        group = EnvironmentGroup(WebShopConfig(catalog=catalog))

        async def episode(slot: int) -> int:
            await group.reset(slot, tasks[slot % len(tasks)])
            steps = 0
            for action in scripts[slot % len(scripts)][:15]:
                steps += 1
                if (await group.step(slot, action)).done:
                    break
            return steps

        async def episodes() -> list[int]:
            return await asyncio.gather(*map(episode, range(MANY)))

        start = time.monotonic()
        steps = asyncio.run(episodes())
        seconds = time.monotonic() - start
        workers = len(group.workers)
        group.close()
    return {"actors/episodes": len(steps), "actors/workers": workers, "actors/steps_per_s": sum(steps) / seconds}


PARTS = {
    "numpy": numpy_alone,
    "speed": speed,
    "compat": compat_speed,
    "environment": one_environment,
    "thousand": thousand,
    "growth": growth,
    "actors": actors,
}


if __name__ == "__main__":
    raise SystemExit(main())
