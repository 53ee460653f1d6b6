"""The plugin: what vLLM finds of it, and that its processes end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("vllm")


def test_vllm_finds_the_backends_and_registers_them_once() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.plugins import load_plugins_by_group

    plugin = load_plugins_by_group("vllm.general_plugins")["megagent_receiver"]
    plugin()
    plugin()
    found = {name: WeightTransferEngineFactory._registry[name]().__name__ for name in ("megagent", "megagent_file")}
    assert found == {"megagent": "ShardReceiver", "megagent_file": "FileReceiver"}


CHILD_AND_PARENT = """
import multiprocessing, os, sys, time
from megagent.parallel.reshard.receiver import end_with_parent
def child():
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)
if __name__ == "__main__":
    os.environ["MEGAGENT_ENGINE_OWNER"] = str(os.getpid())
    multiprocessing.get_context("fork").Process(target=child).start()
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD_AND_PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)
        alive = child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        if alive:
            child.kill()
    assert not alive
