#!/usr/bin/env bash
# A real Slurm of two nodes on this machine, private to one folder, for trying and testing job scripts. Needs root and the
# commands slurmctld, slurmd and munged (Debian and Ubuntu: apt-get install slurmctld slurmd slurm-client munge).
#
#   slurm/local_slurm.sh start FOLDER    then: export SLURM_CONF=FOLDER/slurm.conf; sbatch ...
#   slurm/local_slurm.sh stop FOLDER     cancels what runs, stops the daemons, removes the folder
#
# Nothing outside the folder is written. Both nodes are this machine, so they share /tmp and /dev/shm.
set -euo pipefail

die() {
    printf 'local_slurm: %s\n' "$*" >&2
    exit 1
}

# usage: configure FOLDER; the ports come from the first free ones, so that several can run side by side
configure() {
    local base=$1 port=16817 memory
    while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 10)); done
    memory=$(awk '/^MemTotal/ { print int($2 / 1024 / 2) }' /proc/meminfo)
    cat >"$base/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$base/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$base/state
SlurmdSpoolDir=$base/spool/%n
SlurmctldPidFile=$base/slurmctld.pid
SlurmdPidFile=$base/slurmd-%n.pid
SlurmctldLogFile=$base/slurmctld.log
SlurmdLogFile=$base/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
JobRequeue=1
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 2))] CPUs=$(nproc) RealMemory=$memory State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
    local base=$1 name
    [ "$(id -u)" = 0 ] || die "the daemons start as root only: run it as root or in a container."
    for name in slurmctld slurmd munged; do
        command -v "$name" >/dev/null || die "$name is missing: apt-get install slurmctld slurmd slurm-client munge."
    done
    [ ! -e "$base/slurm.conf" ] || die "$base already has a Slurm: stop it first, or name another folder."
    mkdir -p "$base/munge" "$base/state" "$base/spool/node1" "$base/spool/node2"
    base=$(cd "$base" && pwd)
    chmod 755 "$base" "$base/munge"
    (umask 077 && dd if=/dev/urandom of="$base/munge/key" bs=1 count=1024 status=none)
    munged --key-file="$base/munge/key" --socket="$base/munge/socket" --pid-file="$base/munge/pid" \
        --log-file="$base/munge/log" --seed-file="$base/munge/seed"
    configure "$base"
    export SLURM_CONF=$base/slurm.conf
    slurmctld
    for name in node1 node2; do slurmd -N "$name"; done
    for _ in {1..60}; do
        [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" != 2 ] || return 0
        sleep 0.5
    done
    stop "$base" || true
    die "the two nodes did not become idle within 30 s."
}

stop() {
    local base pid file pids=()
    base=$(cd "$1" 2>/dev/null && pwd) || return 0
    export SLURM_CONF=$base/slurm.conf
    timeout 20 scancel --user=root 2>/dev/null || true
    for _ in {1..60}; do
        [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || break
        sleep 0.5
    done
    for file in "$base"/slurmd-node1.pid "$base"/slurmd-node2.pid "$base"/slurmctld.pid "$base"/munge/pid; do
        if pid=$(cat "$file" 2>/dev/null) && kill -TERM "$pid" 2>/dev/null; then pids+=("$pid"); fi
    done
    for _ in {1..20}; do
        if [ "${#pids[@]}" = 0 ] || ! kill -0 "${pids[@]}" 2>/dev/null; then break; fi
        sleep 0.5
    done
    [ "${#pids[@]}" = 0 ] || kill -KILL "${pids[@]}" 2>/dev/null || true
    rm -rf "$base"
}

case "${1:-} ${2:+folder}" in
    "start folder") start "$2" ;;
    "stop folder") stop "$2" ;;
    *) die "usage: slurm/local_slurm.sh start|stop FOLDER" ;;
esac
