# Systems in folders of their own, for scripts/aarch64.sh and scripts/matrix.sh: Debian trixie and a virtual environment in
# /opt/penstock. To be sourced.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
roots=${PENSTOCK_ROOTS:-$HOME/.cache/penstock/roots}
python=$here/.venv/bin/python

fail() {
    echo "$1" >&2
    exit 1
}

# system ROOT DEBIAN-ARCHITECTURE: make it, unless it is there
system() {
    local root=$1
    if [ ! -d "$root" ]; then
        command -v mmdebstrap >/dev/null || fail "a system in a folder needs mmdebstrap; install that package"
        mkdir -p "$(dirname "$root")"
        rm -rf "$root.part"
        mmdebstrap --variant=minbase --architectures="$2" \
            --include=ca-certificates,iproute2,openssh-client,openssh-server,procps,python3,python3-venv trixie "$root.part" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
        mv "$root.part" "$root"
    fi
    # for what is installed in it by its own pip
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
}

# packages ROOT PLATFORM ARGUMENTS-OF-PIP-INSTALL: a new environment, unless it has been made from the same words; what the
# board's own pip would take half an hour for under emulation, uv does from here in seconds
packages() {
    local root=$1 platform=$2 wanted version work
    shift 2
    wanted=$(fingerprint "$@")
    [ "$(cat "$root/opt/installed" 2>/dev/null)" != "$wanted" ] || return 0
    rm -rf "$root/opt/penstock" "$root/opt/installed"
    chroot "$root" python3 -m venv --without-pip /opt/penstock
    version=$(basename "$root"/opt/penstock/lib/python3*)
    work=$(mktemp -d)
    python3 -m venv "$work"
    "$work/bin/python" -m pip install --quiet uv
    UV_NATIVE_TLS=1 "$work/bin/uv" pip install --quiet --python-platform "$platform" --python-version "${version#python}" \
        --target "$root/opt/penstock/lib/$version/site-packages" "$@"
    compile_natively "$version" "$root/opt/penstock/lib/$version/site-packages"
    rm -rf "$work"
    echo "$wanted" >"$root/opt/installed"
}

# compile_natively PYTHON FOLDER: write its bytecode with a Python of this machine of that version, if there is one; under
# emulation the first import of PyTorch takes four minutes, and one with bytecode one
compile_natively() {
    local other
    for other in "$1" "$HOME/.pyenv/versions/${1#python}".*/bin/python; do
        if "$other" -c '' 2>/dev/null; then
            "$other" -m compileall -q -j 0 -x '/transformers/models/' "$2" >/dev/null || true
            return 0
        fi
    done
}

# fingerprint WORDS: of what these words of pip install, the same in every clone
fingerprint() {
    cat "$here/constraints.txt" - <<<"${*//$here/.}" | sha256sum
}

# enter ROOT COMMAND: as a host of a lab runs one, in the current folder
enter() {
    [ -x "$python" ] || fail "a command in $1 is started by the project's Python, but $python was not found; run make setup"
    unshare --mount "$python" -c '
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1] + "/src")
from penstock.cluster.lab.processes import inside
words = inside(Path(sys.argv[2]), sys.argv[3:])
os.execvp(words[0], words)' "$here" "$@"
}

# versions ROOT: what is in it
versions() {
    chroot "$1" /opt/penstock/bin/python -c 'import platform, importlib.metadata
print("Python", platform.python_version(), "and torch", importlib.metadata.version("torch"), "for", platform.machine())' 2>/dev/null
}
