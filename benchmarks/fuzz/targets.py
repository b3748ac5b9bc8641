"""What is read, from what it is forged, and how: one entry for each reader."""

import base64
import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from safetensors.torch import save
from torch import nn

from benchmarks.fuzz.mutate import mutate_bytes, mutate_document, mutate_program, mutate_text
from penstock.cluster.lab.spec import parse_lab
from penstock.deploy.bundle import read_bundle, read_part
from penstock.deploy.jobs import Document, DoMore, RunBaseline, read_document, write_document
from penstock.engine.counters import read_counters
from penstock.engine.job import StageOptions, StagesJob
from penstock.errors import ClusterError, ProgramError, RunError
from penstock.graph.capture import capture
from penstock.graph.cuts import divide
from penstock.graph.program import StageProgram, read_program, write_program
from penstock.group.board import Verdict, read_verdict
from penstock.group.join import Hello, check_hello
from penstock.group.world import Leave
from penstock.plan.check import check_plan
from penstock.runtime.eager import Runtime
from penstock.spec.cluster import parse_cluster
from penstock.spec.fields import decode_json
from penstock.spec.plan import (
    CutSet,
    DeviceLoad,
    Plan,
    PlannedPipeline,
    PlannedStage,
    Prediction,
    decode_plan,
    encode_plan,
)
from penstock.spec.profile import Boundary, Profile, Unit
from penstock.train.checkpoint_folder import INDEX, CheckpointIndex, DataPosition, OptimizerGroup, read_index
from penstock.transport.messages import DATA, Format, Message
from penstock.values import Size, Value

_PLAN_NAME = "0123456789abcdef"


_HEARTBEAT = {
    "type": "stages", "job": 3, "rank": 1, "busy": False, "num_moved": 0,
    "stages": {"0": {"sent": {"activations": 3, "gradients": 0}, "taken": {"activations": 4, "gradients": 0},
                     "num_run": 4, "busy_s": 0.25, "doing": "computing"}},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """A reader: its share of the cases, what makes a case's bytes, and what reads them in an empty folder."""

    share: float
    make: Callable[[Random], bytes]
    read: Callable[[bytes, Path], None]


def targets() -> dict[str, Target]:
    """Return every target by its name; makes the documents that are forged."""
    programs = [json.loads(write_program(program)) for program in _programs()]
    plan = json.loads(encode_plan(_plan()))
    profile = json.loads(msgspec.json.encode(_profile()))
    index, hello, verdict = (msgspec.to_builtins(each) for each in (_index(), _hello(), _VERDICT))
    jobs = [json.loads(write_document(job)) for job in _jobs(programs)]
    return {
        "program": Target(0.34, lambda r: mutate_program(r, r.choice(programs)), _read_program),
        "plan": Target(0.15, lambda r: mutate_document(r, plan), lambda data, _: check_plan(decode_plan(data))),
        "message": Target(0.15, _forge_message, lambda data, _: _read_message(data)),
        "bundle": Target(0.08, lambda r: _forge_part(r, programs), _read_part),
        "interface": Target(
            0.02,
            lambda r: mutate_document(r, {**programs[0], "ops": [], "states": [], "prelude": []}),
            lambda data, folder: _read_bundle(data, plan, folder),
        ),
        "profile": Target(0.06, lambda r: mutate_document(r, profile), lambda data, _: _read_profile(data)),
        "cluster": Target(0.05, lambda r: mutate_text(r, _CLUSTER), lambda data, _: _as_text(parse_cluster, data)),
        "lab": Target(0.03, lambda r: mutate_text(r, _LAB), lambda data, _: _as_text(parse_lab, data)),
        "progress": Target(0.02, lambda r: mutate_document(r, _HEARTBEAT), lambda data, _: _read_progress(data)),
        "checkpoint": Target(0.04, lambda r: mutate_document(r, index), _read_index),
        "job": Target(0.04, lambda r: mutate_document(r, r.choice(jobs)), lambda data, _: _read_job(data)),
        "hello": Target(0.01, lambda r: mutate_document(r, hello), lambda data, _: _read_hello(data)),
        "verdict": Target(0.01, lambda r: mutate_document(r, verdict), lambda data, _: _read_verdict(data)),
    }


def _programs() -> list[StageProgram]:
    """Capture a transformer, a convolution network, a recurrent one and an embedding, each very small."""
    torch.manual_seed(0)
    convolution = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    made: list[tuple[nn.Module, torch.Tensor]] = [
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.rand(2, 4, 8)),
        (convolution, torch.rand(2, 3, 8, 8)),
        (
            nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1)),
            torch.arange(6).view(2, 3),
        ),
        (nn.LSTM(4, 4, batch_first=True), torch.rand(2, 3, 4)),
    ]
    return [program for module, example in made for program in divide(capture(module.eval(), (example,)), [])]


def _read_program(data: bytes, _: Path) -> None:
    _run(read_program(data))


# called with True before PyTorch's operators run, and with False after
tell_operators: list[Callable[[bool], None]] = []


def _run(program: StageProgram) -> None:
    """Run what was accepted on small inputs, twice, since the second run is not watched."""
    sizes = dict.fromkeys(program.symbols, 2)
    shapes = [value.evaluate({}) for value in (state.value for state in program.states)]
    shapes += [value.evaluate(sizes) for value in program.inputs]
    if any(torch.Size(shape).numel() > 10**5 for shape in shapes):
        return
    state = {s.value.name: torch.ones(s.value.evaluate({}), dtype=s.value.dtype) for s in program.states}
    runtime = Runtime(program, state)
    for tell in tell_operators:
        tell(True)
    for _ in range(2):
        inputs = [torch.ones(value.evaluate(sizes), dtype=value.dtype) for value in program.inputs]
        with torch.inference_mode():
            runtime(sizes, inputs)
    for tell in tell_operators:
        tell(False)


_FORMAT = Format(
    [Value("a", torch.float32, (Size("batch"), 3, 5)), Value("b", torch.bool, (Size(("*", 2, "batch")),)),
     Value("c", torch.int64, ())],
    ["batch"], {"batch": 4},
)  # fmt: skip
_BUFFER_BYTES = _FORMAT.largest({"batch": 4})


def _forge_message(random: Random) -> bytes:
    """Other words in the header, the sizes and the strides, mostly with the checksum of what is claimed."""
    buffer = torch.zeros(_BUFFER_BYTES, dtype=torch.uint8)
    tensors = [torch.ones(2, 3, 5), torch.ones(4, dtype=torch.bool), torch.tensor(7)]
    _FORMAT.write(Message(random.choice([DATA, DATA, DATA, 2, 3]), 0, (2,), tensors), buffer)
    data = bytearray(buffer.numpy().tobytes())
    for _ in range(random.choice([1, 1, 2, 4])):
        word = random.choice([0, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, random.randrange(len(data) - 8)])
        number = random.choice([0, 1, -1, 4, 5, 15, 64, 2**20, 2**33, 2**62, -(2**63), random.randrange(2**63)])
        struct.pack_into("<q", data, word, number)
    total = struct.unpack_from("<Q", data, 24)[0]
    if random.random() < 0.9 and 64 <= total <= len(data) and total % 8 == 0:
        struct.pack_into("<q", data, 56, 0)
        words = torch.frombuffer(data, dtype=torch.int64)[: total // 8]
        struct.pack_into("<q", data, 56, int(words.sum()))
    return bytes(data)


def _read_message(data: bytes) -> None:
    message = _FORMAT.read(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    for tensor in message.tensors:
        tensor.sum()


def _forge_part(random: Random, programs: list[Any]) -> bytes:
    """The files of a part after each other: their lengths, part.json, a program, weights."""
    program = json.dumps(random.choice(programs)).encode()
    weights = _weights(json.loads(program))
    if random.random() < 0.3:
        program = mutate_bytes(random, program)
    if random.random() < 0.3:
        weights = mutate_bytes(random, weights)
    files = {"program-0.json": program, "weights.safetensors": weights}
    part = {
        "plan": _PLAN_NAME, "device": "a", "pipeline": 0, "stage": 0, "programs": ["program-0.json"], "version": 1,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }  # fmt: skip
    text = mutate_document(random, part) if random.random() < 0.6 else json.dumps(part).encode()
    return b"".join(struct.pack("<I", len(content)) + content for content in (text, program, weights))


def _weights(program: Any) -> bytes:
    return save({s["name"]: torch.ones(s["shape"], dtype=getattr(torch, s["dtype"])) for s in program["states"]})


def _read_part(data: bytes, folder: Path) -> None:
    place = 0
    for name in ("part.json", "program-0.json", "weights.safetensors"):
        (size,) = struct.unpack_from("<I", data, place)
        (folder / name).write_bytes(data[place + 4 : place + 4 + size])
        place += 4 + size
    programs, tensors = read_part(folder, _PLAN_NAME)
    for program in programs:
        Runtime(program, tensors)


def _read_bundle(data: bytes, plan: Any, folder: Path) -> None:
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (folder / "interface.json").write_bytes(data)
    read_bundle(folder)


def _read_profile(data: bytes) -> None:
    decode_json(data, Profile, "a profile", ProgramError)


def _as_text(parse: Callable[[str], object], data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ClusterError("it is not UTF-8 text") from None  # as the readers of files say
    parse(text)


def _read_progress(data: bytes) -> None:
    read_counters(3, [data.decode(errors="replace")])


def _read_index(data: bytes, folder: Path) -> None:
    (folder / INDEX).write_bytes(data)
    read_index(folder)


def _index() -> CheckpointIndex:
    tensors = ("model/a", "optimizer/exp_avg/a")
    state = base64.b64encode(bytes(torch.get_rng_state().tolist())).decode()
    return CheckpointIndex(
        model="GPT2", step=10, num_stages=2, num_replicas=1, places=dict.fromkeys(tensors, "stage-0"),
        shapes=dict.fromkeys(tensors, ("float32", [2, 2])), scalars={"a": {"step": 10.0}},
        groups=[OptimizerGroup(settings={"lr": 0.1}, names=["a"], place=0, schedules={})], schedulers=[],
        loaders=[DataPosition(epoch=1, position=3)], trained=0, random=state,
        files={"stage-0/model.safetensors": 10}, elastic=None, save="5" * 32,
    )  # fmt: skip


def _jobs(programs: list[Any]) -> list[Document]:
    serving = StagesJob(
        source="weights", number=3, ranks=(1, 2), sizes={"batch": 2},
        options=StageOptions(threads=1), device_names=("a", "b", "c"), programs={0: [json.dumps(programs[0])]},
    )  # fmt: skip
    alone = RunBaseline(
        program=json.dumps(programs[0]), sizes={"batch": 2}, threads=1, num_inputs=2, num_microbatches=9
    )
    bundled = msgspec.structs.replace(serving, source="bundle", plan=_PLAN_NAME, part="name:1")
    return [serving, bundled, alone, Leave(message="done"), DoMore(name="peer", settings={"modules": ["blocks.1"]})]


def _read_job(data: bytes) -> None:
    document = read_document(data, 3)
    if isinstance(document, StagesJob):
        for text in (text for texts in document.programs.values() for text in texts):
            read_program(text)


_VERDICT = Verdict(rank=1, message="host1: no more paper", lost=True)


def _read_verdict(data: bytes) -> None:
    verdict = read_verdict(data.decode(errors="replace"))
    if "\n" in verdict.message:
        raise ValueError("a verdict is one line")
    if "cannot be read" in verdict.message:  # which is how it is refused
        raise RunError(verdict.message)


def _hello() -> Hello:
    return Hello(
        rank=1, size=2, run="", nonce="0a1b", penstock="1", torch="2", name="rank 1 on b", host="b",
        address="127.0.0.1", board_port=2000, bandwidth_bytes_per_s=1e6,
    )  # fmt: skip


def _read_hello(data: bytes) -> None:
    check_hello(data, msgspec.structs.replace(_hello(), rank=0), 1)


def _plan() -> Plan:
    stages = (PlannedStage(device="a"), PlannedStage(device="name:1"))
    sets = (CutSet(cuts=("blocks.1:after",), weight=0.25), CutSet(cuts=("blocks.2:after",), weight=0.75))
    loads = tuple(DeviceLoad(device=name, load_s=0.1, memory_bytes=1e6) for name in ("a", "name:1"))
    prediction = Prediction(
        rows_per_s=9.0, bound_rows_per_s=10.0, latency_s=0.3, num_rows=100, total_s=11.0, limit="a", devices=loads
    )
    return Plan(
        model="timm:deit_tiny_patch16_224", graph=_PLAN_NAME, profile=_PLAN_NAME, cluster=_PLAN_NAME,
        microbatch_rows=2, pipelines=(PlannedPipeline(stages=stages, cut_sets=sets),), loader="a", writer="a",
        prediction=prediction,
    )  # fmt: skip


def _profile() -> Profile:
    boundaries = tuple(Boundary(name=name, bytes_per_row=100.0) for name in ("input", "blocks.1:after", "output"))
    units = tuple(Unit(forward_s=(0.1, 0.2), parameters=((f"w{i}", 4096),)) for i in range(2))
    return Profile(
        model="line", graph=_PLAN_NAME, device="core", threads=1, rows=(1, 2), boundaries=boundaries, units=units
    )


_CLUSTER = """name = "office"
feeder = "desk"
bandwidth = "1 Gbit/s"
latency = "0.2 ms"
[[devices]]
name = "desk"
speed = 1.0
memory = "8 GiB"
threads = 4
address = "192.168.1.10"
[[devices]]
name = "board"
speed = 0.25
memory = "1 GiB"
bandwidth = "100 Mbit/s"
[[links]]
between = ["desk", "board"]
bandwidth = "300 Mbit/s"
latency = "2 ms"
"""
_LAB = """name = "lab"
bandwidth = "1 Gbit/s"
[[hosts]]
name = "host0"
cpu = 0.35
memory = "1 GiB"
[[hosts]]
name = "host1"
cpu = 0.5
memory = "512 MiB"
bandwidth = "100 Mbit/s"
"""


def clear(folder: Path) -> None:
    """Empty a case's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
