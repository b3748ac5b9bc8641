#!/usr/bin/env bash
# Start the bench by hand, once on each machine:
#
#   scripts/run.sh NNODES NPROC NODE_RANK MASTER_IP [MODEL] [bench options...]
#
# NNODES     how many machines          NODE_RANK  0 on the first machine, 1 on the second, ...
# NPROC      processes per machine      MASTER_IP  the first machine's address
#
# The last line of the output, on every machine, is the speed-up. PORT (29500) may be set.
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
nnodes=$1 nproc=$2 node_rank=$3 master=$4
shift 4
model=${1:-timm:deit_small_patch16_224}
[ $# -gt 0 ] && shift

here=$(cd "$(dirname "$0")/.." && pwd)
python="$here/.venv/bin/python"
[ -x "$python" ] || python=python3

exec "$python" -m torch.distributed.run \
    --nnodes "$nnodes" --nproc-per-node "$nproc" --node-rank "$node_rank" \
    --master-addr "$master" --master-port "${PORT:-29500}" \
    -m penstock bench "$model" --stages "$((nnodes * nproc))" --num-images 500 "$@"
