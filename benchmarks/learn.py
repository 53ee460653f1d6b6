"""Does the tiny agent learn to shop? Trains experiment=webshop_tiny once for each seed and reads the runs' own records.

    python -m benchmarks.learn --seeds 0 1 2 --out runs/learn --plot docs/demo.svg

Bars, for every seed: held-out success sampled at temperature 1 rises by 30 points, greedy success is not lower at the
end, and the training takes at most 12 minutes of wall clock, set-up aside.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import arguments, close
from megagent.observe.recorder import read_metrics

RISE = 0.30
MINUTES = 12.0
QUICK = ("trainer.iterations=2", "trainer.tasks_per_iteration=4", "trainer.mini_batch_rows=64", "trainer.val_tasks=16")


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="keep the run folders here (default: a temporary folder)")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    parser.add_argument("overrides", nargs="*", help="passed on to megagent train")
    options = parser.parse_args()
    seeds = options.seeds[:1] if options.quick else options.seeds
    overrides = [*(QUICK if options.quick else ()), *options.overrides]

    figures: dict[str, float] = {}
    curves: dict[int, tuple[list[dict[str, float]], list[dict[str, float]]]] = {}
    rises, greedy_kept, in_time = [], [], []
    with tempfile.TemporaryDirectory(prefix="megagent-learn-") as temporary:
        out = options.out or Path(temporary)
        for seed in seeds:
            folder = out / f"seed-{seed}"
            minutes = train(folder, seed, overrides)
            curve = held_out(folder)
            if not options.json:
                show(seed, minutes, curve)
            curves[seed] = (curve, training(folder))
            first, last = curve[0], curve[-1]
            rise = last["val/sampled/success_rate"] - first["val/sampled/success_rate"]
            rises.append(rise)
            greedy_kept.append(last["val/greedy/success_rate"] >= first["val/greedy/success_rate"])
            in_time.append(minutes <= MINUTES)
            figures |= {
                f"seed{seed}/sampled_before": first["val/sampled/success_rate"],
                f"seed{seed}/sampled_after": last["val/sampled/success_rate"],
                f"seed{seed}/greedy_before": first["val/greedy/success_rate"],
                f"seed{seed}/greedy_after": last["val/greedy/success_rate"],
                f"seed{seed}/minutes": minutes,
            }
    if options.plot:
        draw(options.plot, curves)
    bars = {
        "sampled held-out success rises by 30 points in every seed": min(rises) >= RISE,
        "greedy held-out success is not lower at the end in any seed": all(greedy_kept),
        "every training takes at most 12 minutes": all(in_time),
    }
    return close("learn", figures, bars)


def train(folder: Path, seed: int, overrides: list[str]) -> float:
    """Minutes of wall clock of one training, from the command to its end."""
    command = [sys.executable, "-m", "megagent.cli", "train", "experiment=webshop_tiny"]
    start = time.monotonic()
    subprocess.run(
        [*command, f"trainer.seed={seed}", f"trainer.run_dir={folder}", *overrides],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=3600,
    )
    return (time.monotonic() - start) / 60


def held_out(folder: Path) -> list[dict[str, float]]:
    """The validation records of a run, in order."""
    return [line for line in read_metrics(folder / "metrics.jsonl") if "val/sampled/success_rate" in line]


def training(folder: Path) -> list[dict[str, float]]:
    """The records of a run's iterations, in order."""
    return [line for line in read_metrics(folder / "metrics.jsonl") if "episode/success_rate" in line]


def draw(path: Path, curves: dict[int, tuple[list[dict[str, float]], list[dict[str, float]]]]) -> None:
    """Held-out success with its 95% interval, one panel for sampled and one for greedy, one line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    for panel, title in zip(
        panels, ("held-out, sampled at temperature 1", "held-out, greedy", "training tasks, sampled"), strict=True
    ):
        panel.set(title=title, xlabel="iteration", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("success")
    for seed, (held_out_curve, training_curve) in curves.items():
        for panel, kind in zip(panels, ("sampled", "greedy"), strict=False):
            steps, rates, low, high = (
                [record[key] for record in held_out_curve]
                for key in ("step", *(f"val/{kind}/success_{name}" for name in ("rate", "low", "high")))
            )
            panel.plot(steps, rates, marker="o", label=f"seed {seed}")
            panel.fill_between(steps, low, high, alpha=0.12)
        panels[2].plot(
            [record["step"] for record in training_curve], [record["episode/success_rate"] for record in training_curve]
        )
    panels[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def show(seed: int, minutes: float, curve: list[dict[str, float]]) -> None:
    print(f"seed {seed}: {minutes:.1f} minutes")
    for record in curve:
        cells = [
            f"{kind} {record[f'val/{kind}/success_rate']:.1%} "
            f"({record[f'val/{kind}/success_low']:.1%}-{record[f'val/{kind}/success_high']:.1%})"
            for kind in ("sampled", "greedy")
        ]
        print(f"  iteration {int(record['step']):3d}  {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
