#!/usr/bin/env bash
# Build the source package and the wheel and check both; with --install put the wheel into empty environments, one without
# extras and one for each extra.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}

"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build twine
rm -rf dist
"$work/tools/bin/python" -m build --outdir dist . >"$work/build.log" 2>&1 || { tail -n 20 "$work/build.log"; exit 1; }
"$work/tools/bin/python" -m twine check --strict dist/*

"$python" - dist/*.whl <<'EOF'
import sys, zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
for wanted in ("penstock/py.typed", "penstock/graph/operators.txt", "penstock/report/page/assets/"):
    if not any(name.startswith(wanted) for name in names):
        sys.exit(f"the wheel lacks {wanted}")
strange = [name for name in names if not name.startswith(("penstock/", "penstock-"))]
if strange:
    sys.exit(f"the wheel has {strange[0]}, which is not penstock's")
EOF

if [ "${1:-}" = --install ]; then # PyTorch comes too: minutes
    "$work/tools/bin/python" -m pip install --quiet uv
    uv() { UV_NATIVE_TLS=1 "$work/tools/bin/uv" "$@"; }
    extras=$("$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"])')
    for extra in "" $extras; do
        uv venv --quiet --clear --python "$python" "$work/empty"
        uv pip install --quiet --python "$work/empty/bin/python" "$(echo dist/*.whl)${extra:+[$extra]}"
        uv pip check --quiet --python "$work/empty/bin/python"
        (cd "$work" && empty/bin/penstock --version && empty/bin/penstock schedule 1f1b --stages 2 --microbatches 2 >schedule)
        echo "installed with ${extra:-no extra}"
    done
fi
echo "dist has $(ls dist | tr '\n' ' ')"
