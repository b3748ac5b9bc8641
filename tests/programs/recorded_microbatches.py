"""Keeps microbatches of six cut sets, measures a baseline with them, and prints by how much peak memory has grown."""

import torch
from torch import nn

from penstock.deploy.state import load_state
from penstock.engine.observer import StreamObserver
from penstock.engine.reference import measure_baseline
from penstock.engine.stages import ForwardStage
from penstock.graph.capture import capture
from penstock.graph.cuts import divide
from penstock.resources import peak_bytes
from penstock.runtime.eager import Runtime
from penstock.transport.messages import DATA, Message
from penstock.zoo.weights.weights import ModuleWeights

model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).eval()
graph = capture(model, (torch.zeros(2048, 512),))
program, weights = divide(graph, [])[0], ModuleWeights(model)
tensors = {state.value.name: load_state(graph, state, weights) for state in graph.states}
runtimes = [Runtime(program, tensors) for _ in range(6)]
observer = StreamObserver({0: ForwardStage(runtimes)}, "here", 4)
with torch.inference_mode():
    runtimes[0]({"batch": 2048}, [torch.zeros(2048, 512)])
    before = peak_bytes()
    for index in range(60):
        observer.keep(0, Message(DATA, index, (2048,), [torch.zeros(2048, 512)], program=index % 6))
    assert 1 <= len(observer.kept[0]) <= 6
    alone = measure_baseline(0, runtimes, observer.kept[0], observer.num_run[0], others=4, alone_s=0.0)
    assert alone.seconds > 0
print(peak_bytes() - before)
