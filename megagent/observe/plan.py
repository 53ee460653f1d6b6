"""What a configuration amounts to, on paper: layout of ranks and engines, and the batch arithmetic of an iteration."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megagent.algos.schedule import batch_plan
from megagent.config import Config
from megagent.model_source import hf_config_of
from megagent.parallel.models import family_of


def _stage_layers(layers: int, first: int | None, pp: int) -> tuple[str, str]:
    if first is None:
        return f"{layers // pp} layers", f"{layers} layers / pp {pp}"
    return f"{first} or {layers // pp} layers", f"{layers} layers / pp {pp}; the first stage takes what is left over"


def print_plan(config: Config, console: Console | None = None) -> None:
    """Prints the parallel layout and the batch table of a checked configuration."""
    console = console or Console()
    # Into a file or a pipe a table is as wide as its text, not as a terminal that is not there.
    console = console if console.is_terminal else Console(file=console.file, width=160)
    console.print(f"{config.experiment_name}: {config.algo.estimator} on {config.env.name}", style="bold")
    console.print(_table("parallel layout", ("what", "value", "how"), layout(config)))
    rows = [(row.name, f"{row.value:,}", row.how) for row in batch_plan(config)]
    console.print(_table("batch", ("what", "rows, unless said", "how"), rows))


def layout(config: Config) -> list[tuple[str, str, str]]:
    """(what, value, how) of the layout of model, ranks and engines."""
    parallel, rollout, cluster = config.parallel, config.rollout, config.cluster
    hf_config = hf_config_of(config.model.path)
    family = family_of(hf_config)
    sizes = family.sizes(hf_config)
    tp, pp = parallel.tp, parallel.pp
    kv_heads = f"{sizes.kv_heads // tp} of {sizes.kv_heads}" if sizes.kv_heads >= tp else "a part of one"
    heads = f"{sizes.heads // tp} of {sizes.heads} query heads, {kv_heads} key/value heads"
    share = f"{heads}, {sizes.ffn // tp} of {sizes.ffn} feed-forward columns"
    world = parallel.world
    rows = [
        ("model", config.model.path, f"{family.name}, {sizes.layers} layers x {sizes.hidden}, {config.model.dtype}"),
        ("training ranks", f"{world}", f"tp {tp} x pp {pp} x dp {parallel.dp}"),
        ("of a tp rank", f"1/{tp} of a layer", share),
        ("of a pp stage", *_stage_layers(sizes.layers, family.first_stage_layers(hf_config, pp), pp)),
        (
            "vocabulary of a tp rank",
            f"{family.padded_vocab(hf_config, tp) // tp}",
            f"{sizes.vocab} entries, {family.padded_vocab(hf_config, tp) - sizes.vocab} of padding",
        ),
        ("rollout engines", f"{rollout.engines}", f"vLLM, tp {rollout.tp} each"),
        ("environment workers", *_workers(config)),
    ]
    if cluster.platform == "cuda":
        gpus = cluster.nodes * cluster.gpus_per_node
        rows.append(
            ("GPUs", f"{world} of {gpus}", f"nodes {cluster.nodes} x {cluster.gpus_per_node} each; engines share them")
        )
    else:
        rows.append(("platform", cluster.platform, f"threads of a rank or engine worker: {cluster.threads}"))
    return rows


def _workers(config: Config) -> tuple[str, str]:
    workers = config.env.workers
    return (f"{workers}", "Ray actors") if workers else ("by cores", "Ray actors: a node's cores but one, at most 16")


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column, justify in zip(columns, ("left", "right", "left"), strict=True):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table
