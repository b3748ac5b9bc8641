"""Streams under torchrun from one buffer that is filled again and again, and writes into every output."""

import sys

import penstock
from tests.stream.test_callers_memory import check, different, passing

model = passing()
with penstock.Pipeline(model, (different(1)[0],), stages=int(sys.argv[1]), threads=1) as pipe:
    if pipe._streaming.feeds:
        check(pipe, model)
    else:
        for _ in range(2):
            list(pipe.stream([]))
