"""How fast are conversions, and in how much memory? Hugging Face -> Megatron -> Hugging Face, next to plain copies.

    python -m benchmarks.convert --gib 4 --out /scratch/convert

A model of Qwen2.5-1.5B's widths is made up and converted there and back by a process of its own, in turns with a copy
of its files by shutil.copyfile. Both leave the writing to the disk to the kernel, as a copy does. Bars: each direction
is at least 0.6 as fast as the copy beside it (median over the rounds), and the process' peak is at most its idle memory
(torch and Megatron imported) plus the largest tensor plus 512 MiB.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import arguments, close
from megagent.parallel.convert import hf_folder
from megagent.parallel.models import architecture_of

SHARE = 0.6
ABOVE = 512 << 20
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# Runs in a process of its own: prints the seconds of a conversion, and the process' peak and idle memory in bytes.
WORKER = """
import json, resource, sys, time
from pathlib import Path
def memory(kind):
    line = next(line for line in open("/proc/self/status") if line.startswith(kind))
    return int(line.split()[1]) * 1024
from megagent.parallel import platform
platform.install("cpu")
import megatron.core.dist_checkpointing
from megagent.parallel.convert import conversion
from megagent.parallel.degrees import Degrees
idle = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
source, out, direction, workers = sys.argv[1:]
options = conversion.Options(workers=int(workers), quiet=True)
start = time.perf_counter()
if direction == "megatron":
    conversion.to_megatron(Path(source), Path(out), Degrees(), options)
else:
    conversion.to_hf(Path(source), Path(out), None, options)
print(json.dumps([time.perf_counter() - start, memory("VmHWM"), idle]))
"""


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, help="work in this folder (default: a temporary one)")
    options = parser.parse_args()
    gib, rounds = (0.75, 2) if options.quick else (options.gib, options.rounds)
    shares: dict[str, list[float]] = {"megatron": [], "hf": []}
    rates: dict[str, list[float]] = {"copy": [], "megatron": [], "hf": []}
    above = 0.0
    with tempfile.TemporaryDirectory(prefix="megagent-convert-", dir=options.out) as temporary:
        folder = Path(temporary)
        size, largest = make_model(folder / "model", gib)
        for _ in range(rounds):
            for direction, source, out in (("megatron", "model", "there"), ("hf", "there", "back")):
                copied = copy(folder / "model", folder / "copy")
                seconds, peak, idle = convert(folder / source, folder / out, direction, options.workers)
                rates["copy"].append(size / copied)
                rates[direction].append(size / seconds)
                shares[direction].append(copied / seconds)
                above = max(above, peak - idle)
                if not options.json:
                    rate, plain = size / seconds / 1e9, size / copied / 1e9
                    memory = (peak - idle) / 2**20
                    print(
                        f"to {direction} {rate:.2f} GB/s, copy {plain:.2f} GB/s, memory +{memory:.0f} MiB", flush=True
                    )
            shutil.rmtree(folder / "there")
            shutil.rmtree(folder / "back")
    figures = {f"{name}_gb_per_s": statistics.median(values) / 1e9 for name, values in rates.items()}
    figures |= {f"to_{name}_of_copy": statistics.median(values) for name, values in shares.items()}
    figures |= {
        "memory_above_idle_mib": above / 2**20,
        "largest_tensor_mib": largest / 2**20,
        "model_gib": size / 2**30,
    }
    bars = {
        "a conversion is at least 0.6 as fast as a copy": all(statistics.median(v) >= SHARE for v in shares.values()),
        "peak memory above idle is at most the largest tensor and 512 MiB": above <= largest + ABOVE,
    }
    return close("convert", figures, bars)


def make_model(folder: Path, gib: float) -> tuple[int, int]:
    """A model of about this size, random bits for weights. Returns its bytes, and those of the largest tensor."""
    folder.mkdir()
    one = architecture_of({**CONFIG, "num_hidden_layers": 1}).hf_shapes()
    two = architecture_of({**CONFIG, "num_hidden_layers": 2}).hf_shapes()
    sizes = [2 * sum(map(math.prod, shapes.values())) for shapes in (one, two)]
    layers = max(1, round((gib * 2**30 - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    config = {**CONFIG, "num_hidden_layers": layers}
    shapes = architecture_of(config).hf_shapes()
    _, extents, total = hf_folder.lay_out(folder, shapes, dict.fromkeys(shapes, "BF16"), 1 << 30)
    noise = np.random.default_rng(0).integers(0, 256, 1 << 24, dtype=np.uint8).tobytes()
    for extent in extents.values():
        with open(extent.path, "r+b") as file:
            file.seek(extent.offset)
            for low in range(0, extent.size, len(noise)):
                file.write(noise[: extent.size - low])
    (folder / "config.json").write_text(json.dumps(config))
    return total, max(extent.size for extent in extents.values())


def copy(source: Path, target: Path) -> float:
    """Seconds of a plain copy of the files."""
    target.mkdir()
    start = time.perf_counter()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def convert(source: Path, out: Path, direction: str, workers: int) -> tuple[float, float, float]:
    """Seconds, and the process' peak and idle memory in bytes."""
    command = [sys.executable, "-c", WORKER, str(source), str(out), direction, str(workers)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3600)
    seconds, peak, idle = json.loads(answer.stdout.splitlines()[-1])
    return seconds, peak, idle


if __name__ == "__main__":
    sys.exit(main())
