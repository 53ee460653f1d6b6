"""Stands in for the `megagent` command in job tests: joins the job's Ray and writes what it sees as one JSON line.

Arguments beside the overrides: test.exit=STATUS ends with that status, test.sleep=SECONDS stays that long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import ray


def argument(name: str, default: str) -> str:
    found = [value for key, _, value in (item.partition("=") for item in sys.argv[1:]) if key == name]
    return found[-1] if found else default


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Leaker:
    """Starts a process that leaves the actor's session, as a badly behaved tool would."""

    def leak(self) -> int:
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def stranger_is_refused(address: str) -> bool:
    """Whether a process with another token cannot see the cluster."""
    wrong = os.path.join(os.environ["TMPDIR"], "wrong_token")
    with open(wrong, "w", encoding="utf-8") as file:
        file.write("0" * 64)
    environment = os.environ | {"RAY_AUTH_TOKEN_PATH": wrong}
    command = ["timeout", "30", "ray", "status", f"--address={address}"]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode != 0


def main() -> None:
    address = argument("cluster.ray_address", "")
    ray.init(address=address, log_to_driver=False)
    leaker = Leaker.remote()
    seen = {
        "arguments": sys.argv[1:],
        "nodes": sum(node["Alive"] for node in ray.nodes()),
        "leaked": ray.get(leaker.leak.remote()),
        "token_mode": os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode & 0o777,
        "stranger_is_refused": stranger_is_refused(address) if argument("test.stranger", "") else None,
    }
    print("probe: " + json.dumps(seen), flush=True)
    time.sleep(float(argument("test.sleep", "0")))
    sys.exit(int(argument("test.exit", "0")))


if __name__ == "__main__":
    main()
