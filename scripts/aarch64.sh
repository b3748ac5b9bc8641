#!/usr/bin/env bash
# An emulated board: Debian trixie for 64-bit ARM with its own Python, whose programs qemu-user runs.
#
#   scripts/aarch64.sh build            make it, unless it is there, and install what a board gets
#   scripts/aarch64.sh test [WORDS]     run the tests that are marked `board` in it; WORDS are pytest's
#   scripts/aarch64.sh run COMMAND      run a command in it, in the current folder
#   scripts/aarch64.sh push [FILE]      from an empty home to predictions: hosts push and hosts run over its sshd
#   scripts/aarch64.sh remove           take it away
#
# It lies in $PENSTOCK_ROOTS/aarch64 (~/.cache/penstock/roots/aarch64), and hosts of a lab with arch = "aarch64" run in it.
# Needs root, mmdebstrap and qemu-user-static.
set -euo pipefail
. "$(dirname "$0")/roots.sh"
root=$roots/aarch64
# what hosts push brings to a first machine, and what tests need
wanted=(torch numpy safetensors msgspec pyzmq typer rich timm transformers pillow
    onnx onnxruntime scikit-learn psutil pytest pytest-timeout pytest-xdist hypothesis)

emulate() {
    [ "$(id -u)" = 0 ] || fail "an emulated board needs root; run it with sudo"
    [ "$(uname -m)" != aarch64 ] || return 0
    local registry=/proc/sys/fs/binfmt_misc
    [ -e $registry/register ] || mount -t binfmt_misc binfmt_misc $registry ||
        fail "an emulated board needs binfmt_misc, which cannot be mounted here"
    [ ! -e $registry/qemu-aarch64 ] || return 0
    [ -e /usr/lib/binfmt.d/qemu-aarch64.conf ] || fail "an emulated board needs qemu-user-static; install that package"
    cat /usr/lib/binfmt.d/qemu-aarch64.conf >$registry/register
}

build() {
    emulate
    system "$root" arm64
    mkdir -p "$here/build"
    # the same choice of PyTorch as on a board
    python3 - "$here" "${wanted[@]}" >"$here/build/board-words" <<'EOF'
import sys
here, *wanted = sys.argv[1:]
sys.path.insert(0, here + "/src/penstock/cluster")
from install import with_last_cpu
print(*with_last_cpu(["--constraint", here + "/constraints.txt", *wanted], here + "/build"))
EOF
    # shellcheck disable=SC2046 # several words
    packages "$root" aarch64-manylinux_2_36 $(cat "$here/build/board-words")
    echo "$root has $(versions "$root"), $(du -sm "$root" | cut -f1) MB"
}

case ${1:-} in
build) build ;;
test)
    shift
    build
    cd "$here"
    # shellcheck disable=SC2046 # several files: to import all would take minutes
    TESTS_PATIENCE=20 enter "$root" python -m pytest -m board -p no:cacheprovider -o timeout=1800 \
        $(grep -rl --include='test_*.py' 'mark\.board' tests) "$@"
    ;;
run)
    shift
    build >&2
    enter "$root" "$@"
    ;;
push)
    build
    cd "$here"
    "$python" -m benchmarks.faults.bare --board --json "${2:-/dev/stdout}"
    ;;
remove) rm -rf "$root" "$root.part" ;;
*)
    sed -n '2,12s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
