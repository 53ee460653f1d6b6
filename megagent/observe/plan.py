"""What a configuration amounts to, on paper: layout of ranks and engines, and the batch arithmetic of an iteration."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megagent.algos.schedule import batch_plan
from megagent.config import Config
from megagent.model_source import hf_config_of
from megagent.parallel.degrees import Degrees, degrees_of
from megagent.parallel.models import Architecture, architecture_of


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
    model, degrees = architecture_of(hf_config_of(config.model.path)), degrees_of(parallel)
    tp, vocab = degrees.tp, model.padded_vocab(degrees.tp)
    ranks = f"tp {tp} x pp {degrees.pp} x dp {degrees.dp}"
    kv_heads = f"{model.kv_heads // tp} of {model.kv_heads}" if model.kv_heads >= tp else "a part of one"
    heads = f"{model.heads // tp} of {model.heads} query heads, {kv_heads} key/value heads"
    columns = "" if model.experts else f", {model.ffn // tp} of {model.ffn} feed-forward columns"
    rows = [
        ("model", config.model.path, f"{model.family}, {model.layers} layers x {model.hidden}, {config.model.dtype}"),
        ("training ranks", f"{degrees.world}", ranks + (", sequence parallel" if degrees.sequence_parallel else "")),
        ("of a tp rank", f"1/{tp} of a layer", heads + columns),
        ("of a pp stage", *_stage_layers(model, degrees)),
        *_experts(model, degrees),
        ("vocabulary of a tp rank", f"{vocab // tp}", f"{model.vocab} entries, {vocab - model.vocab} of padding"),
        ("rollout engines", f"{rollout.engines}", f"vLLM, tp {rollout.tp} each"),
        ("environment workers", *_workers(config)),
    ]
    if cluster.platform == "cuda":
        gpus = cluster.nodes * cluster.gpus_per_node
        rows.append(
            (
                "GPUs",
                f"{degrees.world} of {gpus}",
                f"nodes {cluster.nodes} x {cluster.gpus_per_node} each; engines share them",
            )
        )
    else:
        rows.append(("platform", cluster.platform, f"threads of a rank or engine worker: {cluster.threads}"))
    return rows


def _workers(config: Config) -> tuple[str, str]:
    workers = config.env.workers
    return (f"{workers}", "Ray actors") if workers else ("by cores", "Ray actors: a node's cores but one, at most 16")


def _stage_layers(model: Architecture, degrees: Degrees) -> tuple[str, str]:
    """(value, how) of the layers of a pipeline stage."""
    counts = [0] * degrees.pp
    for chunk in model.stages(degrees):
        counts[chunk.pp_rank] += len(chunk.layers)
    value = " or ".join(str(count) for count in sorted(set(counts)))
    chunks = f" x vpp {degrees.vpp}" if degrees.vpp > 1 else ""
    left_over = "; those left over go to the middle" if model.layers % (degrees.pp * degrees.vpp) else ""
    return f"{value} layers", f"{model.layers} layers / pp {degrees.pp}{chunks}{left_over}"


def _experts(model: Architecture, degrees: Degrees) -> list[tuple[str, str, str]]:
    if model.experts is None:
        return []
    count, ffn, etp = model.experts.count, model.experts.ffn, degrees.expert_tp
    how = f"{count} experts / ep {degrees.ep}, {ffn // etp} of {ffn} columns of each (etp {etp})"
    return [("experts of a rank", f"{count // degrees.ep}", how)]


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column, justify in zip(columns, ("left", "right", "left"), strict=True):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table
