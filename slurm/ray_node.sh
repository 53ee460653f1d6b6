#!/usr/bin/env bash
# One node of a job's private Ray cluster: lives until its standard input ends, then takes everything along.
#
#   srun ... slurm/ray_node.sh head|worker HOST:PORT < control
#
# The first line of standard input is the job's token (never an argument or a variable, which others could read). The end
# of standard input is the order to stop: it comes when the batch script closes it, and also when that script is killed.
# shellcheck disable=SC2317  # functions that only a trap calls look unreachable
set -uo pipefail
umask 077

role=$1
address=$2
dir=/tmp/megagent-$SLURM_JOB_ID  # short: Ray's sockets lie below it, and a socket's path has at most 107 bytes
shm=/dev/shm/megagent-$SLURM_JOB_ID
grace_s=5  # well below Slurm's KillWait (30 s unless configured), or the sweep itself would be killed; Ray would drain for 30 s

ours() {
    # Processes of this job's Ray on this node, by their environment: on a shared node other jobs run Ray as well.
    local entry pid
    for entry in /proc/[0-9]*; do
        pid=${entry#/proc/}
        if [ "$pid" != $$ ] && grep -qzxF "RAY_TMPDIR=$dir" "$entry/environ"; then
            echo "$pid"
        fi
    done 2>/dev/null
}

is_tracker() {
    grep -q resource_tracker "/proc/$1/cmdline" 2>/dev/null
}

# Ends this job's processes on this node, those that left their session or parent too.
sweep() {
    local pid pids deadline=$((SECONDS + grace_s))
    mapfile -t pids < <(ours)
    [ "${#pids[@]}" = 0 ] || kill -TERM "${pids[@]}" 2>/dev/null
    while [ "$SECONDS" -lt "$deadline" ]; do
        mapfile -t pids < <(ours)
        [ "${#pids[@]}" != 0 ] || break
        sleep 0.5
    done
    # Python's resource trackers go last: once their process is gone they unlink its shared memory, then end by themselves.
    for pid in "${pids[@]}"; do
        is_tracker "$pid" || kill -KILL "$pid" 2>/dev/null
    done
    [ "${#pids[@]}" = 0 ] || sleep 1
    mapfile -t pids < <(ours)
    [ "${#pids[@]}" = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null
}

finish() {
    trap '' TERM INT HUP
    [ -z "${ray:-}" ] || disown "$ray" 2>/dev/null  # no "Killed" line in the job's output
    [ -z "${control:-}" ] || kill "$control" 2>/dev/null
    sweep
    rm -rf "$dir" "$shm"
}

# A folder left by an earlier life of a requeued job is ours to replace; anybody else's is not.
make_private() {
    if [ -e "$1" ] && { [ -L "$1" ] || [ ! -O "$1" ]; }; then
        echo "ray_node: $1 exists and is not ours: have it removed, or submit again for another job number." >&2
        exit 1
    fi
    mkdir -p "$1"  # 700 by the umask
}

make_private "$dir"
make_private "$shm"
trap 'exit 143' TERM INT HUP
trap finish EXIT

IFS= read -r token || { echo "ray_node: no token came on standard input." >&2; exit 1; }
printf '%s' "$token" >"$dir/token"
unset token RAY_ADDRESS
# Before the exports, so that the sweep spares it. Without <&0 bash gives a background command /dev/null.
cat <&0 >/dev/null &
control=$!
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$dir/token RAY_TMPDIR=$dir TMPDIR=$dir
# Process titles would overwrite the environment that `ours` reads.
export SPT_NOENV=1 RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0

options=(--disable-usage-stats --num-cpus="${SLURM_CPUS_ON_NODE:-1}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}")
# Ports by chance: the fixed ranges that Ray takes otherwise collide with other jobs on a shared node.
options+=(--min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0)
if [ "$role" = head ]; then
    options+=(--head --node-ip-address="${address%:*}" --port="${address##*:}" --include-dashboard=false)
    options+=(--ray-client-server-port=$((${address##*:} + 1)))
else
    options+=(--address="$address")
fi
for attempt in 1 2 3; do
    ray start "${options[@]}" --block </dev/null >"$dir/ray_start.log" 2>&1 &
    ray=$!
    # Bash runs a trap only between foreground commands, and `wait` is the one it interrupts for it.
    wait -n "$ray" "$control"
    kill -0 "$control" 2>/dev/null || exit 0
    # Ray gives a node 30 s to start, too little on a busy machine or a slow file system.
    if grep -q "Ray runtime started" "$dir/ray_start.log" || [ "$attempt" = 3 ]; then
        break
    fi
    echo "ray_node: Ray did not start on $(hostname) ($role of $address); trying again." >&2
    sweep
done
echo "ray_node: Ray ended on $(hostname) ($role of $address); its last lines:" >&2
tail -n 15 "$dir/ray_start.log" >&2
exit 1
