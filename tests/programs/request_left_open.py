"""Ends while a request is in flight."""

import sys

import penstock
from tests.generate.decoders import decoder, prompts

generator = penstock.Generator(decoder("llama"), stages=int(sys.argv[1]), max_length=512)
request = generator.submit(prompts(5)[0], max_new_tokens=500, min_new_tokens=500)
assert (generator.pipeline.world.workers is None) == (sys.argv[1] == "1")
next(iter(request))
raise SystemExit(3)
