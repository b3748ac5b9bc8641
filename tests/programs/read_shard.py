"""Reads a file of cached rows, and checks them."""

import sys
from pathlib import Path

from penstock.elastic.shard import Shard
from tests.elastic.cache.shards import check_rows, layout_of

with Shard.open(Path(sys.argv[1]), layout_of()) as shard:
    check_rows(shard)
