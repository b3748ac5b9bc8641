#!/usr/bin/env bash
# Run the suite with other Pythons and PyTorches: one row of the table in docs/limits.md for each.
#
#   scripts/matrix.sh PYTHON TORCH [WORDS]     such as 3.13 2.10.0; WORDS are pytest's
#   scripts/matrix.sh all                      all rows of the table but those of boards
#
# A Python that this machine has is used as it is; 3.13 is that of Debian trixie, in a root of its own (needs root and
# mmdebstrap). What is installed there is what .ci/run installs, but for the browser and Slurm.
set -euo pipefail
. "$(dirname "$0")/roots.sh"
cd "$here"

row() {
    local version=$1 torch=$2 root output words start
    shift 2
    words=(--constraint "$here/build/matrix-constraints" "torch==$torch" ".[dev]")
    mkdir -p build
    grep -vE '^(torch|torchvision|triton|nvidia[a-z0-9-]*|cuda[a-z0-9-]*)==' constraints.txt >build/matrix-constraints
    root=$roots/x86_64-python$version-torch$torch
    if "python$version" -c "" 2>/dev/null; then
        [ -x "$root/bin/python" ] || "python$version" -m venv "$root"
        "$root/bin/python" -m pip install --quiet "${words[@]:0:3}" --editable ".[dev]"
        start=("$root/bin/python")
    else
        [ "$version" = 3.13 ] || fail "there is no python$version here; only 3.13 is made, in a root of its own"
        system "$root" amd64
        packages "$root" x86_64-manylinux_2_36 "${words[@]}"
        start=(enter "$root" python)
    fi
    output=$("${start[@]}" -m pytest -q -p no:cacheprovider --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@" |
        tee /dev/stderr | tail -n 1) || true
    version=$("${start[@]}" -c 'import platform; print(platform.python_version())')
    echo "| x86-64 | $version | $torch | suite | $output | $(date +%F) | scripts/matrix.sh ${version%.*} $torch |"
}

case ${1:-} in
all)
    for each in "3.11 2.10.0" "3.13 2.10.0" "3.13 2.15.0"; do
        # shellcheck disable=SC2086 # two words
        row $each
    done
    ;;
3.*) row "$@" ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
