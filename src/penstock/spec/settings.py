"""Settings of the verbs that run a model; each is a key of a file for --config, and an option unless it is rare."""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from penstock.errors import UsageError
from penstock.spec.plan import CacheDtype

Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(ge=0.0)]
# paths, stored as text: kept as given, or made absolute so that they are valid in every folder
PathText = Annotated[str, Meta(extra={"path": "as given"})]
WholePath = Annotated[str, Meta(extra={"path": "whole"})]
File = Annotated[str, Meta(extra={"path": "as given", "metavar": "FILE"})]
Pem = Annotated[str, Meta(extra={"path": "as given", "metavar": "PEM"})]
Texts = Annotated[list[str], Meta(extra={"default": None})]
MODEL: dict[str, Any] = {"argument": "MODEL", "default": None}  # in a file, if not on the command line
VISION = "timm:NAME, hf:NAME_OR_PATH or package.module:function."
WeightsFile = Annotated[PathText | None, Meta(description="Safetensors file, index or folder.")]
Pretrained = Annotated[bool, Meta(description="Download the model's published weights.")]
Runtime = Annotated[
    str, Meta(description="eager, compiled, onnxruntime, openvino; also onnxruntime:int8.", extra={"metavar": "NAME"})
]
Device = Annotated[str, Meta(description="cpu, or cuda: a GPU for each process.", extra={"metavar": "cpu|cuda"})]
Threads = Annotated[Positive | None, Meta(description="Threads per stage.")]
Bind = Annotated[str | None, Meta(description="Listening address. Default: the first host's route.")]
Seed = Annotated[int, Meta(description="Seed of random weights, as in PyTorch.")]
CUTS_HELP = "A cut, as PATH:after; may be repeated. Or balanced, equal-blocks, equal-size, smallest-crossing."
Cuts = Annotated[list[str] | None, Meta(description=CUTS_HELP, extra={"flags": ["--cut"], "metavar": "NAME"})]
Live = Annotated[bool, Meta(description="Live view of the stages during the run.")]
TorchProfiler = Annotated[bool, Meta(description="Record torch.profiler's operations too, in --trace DIR.")]
Preprocess = Annotated[str | None, Meta(description="As in size=224x320,mean=0.5,std=0.5,crop_pct=1.")]
WaitFor = Annotated[float, Meta(ge=1.0, description="Seconds to wait with --on-loss wait.")]
TRACE = Meta(
    description="Record a trace in a folder, for `penstock report DIR`.", extra={"metavar": "DIR", "written": "folder"}
)
_RARE_TEXT = ("bind", "cache_dtype", "seed", "slots", "speculate", "top_k", "top_p", "trace", "weights")


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, its stages, and the machine: what all verbs that run a model have."""

    model: Annotated[str, Meta(description=VISION, extra=MODEL)]
    weights: WeightsFile = None
    pretrained: Pretrained = False
    runtime: Runtime = "eager"
    device: Device = "cpu"
    threads: Threads = None
    stages: Annotated[Positive | None, Meta(description="Number of stages. Default: 2, or torchrun's processes.")] = (
        None
    )
    cuts: Cuts = None
    plan: Annotated[File | None, Meta(description="Plan with cuts and devices.")] = None
    on_loss: Annotated[
        Literal["stop", "continue", "wait"] | None,
        Meta(
            description="If a device is lost: stop, continue, or wait for another. Default: continue; traced: stop.",
            extra={"metavar": "ACTION"},
        ),
    ] = None
    bind: Bind = None


class PredictSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `penstock infer`."""

    rare = (
        "bind", "class_order", "costs", "from_cluster", "labels", "live", "logits", "microbatch_size",
        "preprocess", "seed", "top", "torch_profiler", "wait_for",
    )  # fmt: skip

    images: Annotated[Texts, Meta(description="Folder, archive, image or .txt list.")]
    output: Annotated[
        PathText,
        Meta(
            description="Predictions, .csv or JSON lines; - prints them.",
            extra={"flags": ["--output", "-o"], "written": "file"},
        ),
    ] = "predictions.csv"
    num_images: Annotated[Positive | None, Meta(description="Number of images, from the first. Default: all.")] = None
    resume: Annotated[bool, Meta(description="Continue after the existing rows.")] = False
    labels: Annotated[File | None, Meta(description="Lines of image and label, for a flat folder.")] = None
    class_order: Annotated[str | None, Meta(description="torchvision, natural, or a file of the folders.")] = None
    top: Annotated[int, Meta(ge=0, description="Number of best classes in each row.")] = 0
    logits: Annotated[bool, Meta(description="The model's outputs in each row.")] = False
    preprocess: Preprocess = None
    seed: Seed = 0
    microbatch_size: Annotated[Positive, Meta(description="Rows per microbatch.")] = 1
    wait_for: WaitFor = 300.0
    costs: Annotated[File | None, Meta(description="Profile that the plan was made from.")] = None
    from_cluster: Annotated[File | None, Meta(description="Cluster that the plan was made for.")] = None
    trace: Annotated[PathText | None, TRACE] = None
    torch_profiler: TorchProfiler = False
    live: Live = False


class LanguageSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the verbs for which language models answer."""

    threads: Annotated[Positive, Meta(description="Threads per stage.")] = 1
    plan: Annotated[File | None, Meta(description="Plan of `profile --generate`.")] = None
    slots: Annotated[Positive | None, Meta(description="Sequences per lane, which step together. Default: 4.")] = None
    max_length: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Limit on prompt and answer tokens. Default: 512, chats 2048."),
    ] = None
    cache_dtype: Annotated[
        CacheDtype | None, Meta(description="Keys and values in float16, bfloat16 or int8. Default: the model's.")
    ] = None
    speculate: Annotated[
        bool, Meta(description="Speculative decoding while stages are idle; answers do not change.")
    ] = True


class SamplingSettings(LanguageSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the verbs that sample answers themselves."""

    model: Annotated[str, Meta(description="hf:NAME_OR_PATH or gguf:FILE.", extra=MODEL)]
    max_new_tokens: Annotated[Positive, Meta(description="Maximum tokens of an answer.")] = 64
    temperature: Annotated[Rate, Meta(description="Sampling temperature; 0: the likeliest.")] = 0.0
    top_p: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(description="Nucleus sampling: keep this total probability."),
    ] = None
    trace: Annotated[PathText | None, TRACE] = None
    top_k: Annotated[Positive | None, Meta(description="Keep the K likeliest tokens.")] = None
    seed: Annotated[int | None, Meta(description="Seed for sampling. Default: random.")] = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling options of `Generator.submit`; raises `UsageError` if they contradict each other."""
        drawn = self.temperature > 0
        if not drawn and (self.top_p is not None or self.top_k is not None):
            raise UsageError("top_p and top_k need sampling; give --temperature 0.7 too")
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": drawn,
            "temperature": self.temperature or None,
            "top_p": self.top_p,
            "top_k": (self.top_k or 0) if drawn else None,
        }


class TextSettings(SamplingSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `penstock generate`."""

    rare = _RARE_TEXT

    prompt: Annotated[Texts, Meta(description="A prompt; may be repeated.", extra={"flags": ["--prompt", "-p"]})] = (
        msgspec.field(default_factory=list)
    )
    file: Annotated[File | None, Meta(description='Prompts: a line each, or .jsonl with "prompt".')] = None
    output: Annotated[
        File | None,
        Meta(
            description="Answers, .csv or JSON lines; resumed if the file exists.",
            extra={"flags": ["--output", "-o"], "written": "file"},
        ),
    ] = None


class ChatSettings(SamplingSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `penstock chat`."""

    rare = _RARE_TEXT

    system: Annotated[str | None, Meta(description="System prompt.")] = None
    max_new_tokens: Annotated[Positive, Meta(description="Maximum tokens of an answer.")] = 256


class ServeSettings(LanguageSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `penstock serve`."""

    rare = (
        "allow_origin", "bind", "cache_dtype", "deadline", "drain", "max_body", "most_waiting", "name",
        "preprocess", "slots", "speculate", "strict", "weights",
    )  # fmt: skip

    model: Annotated[
        str, Meta(description="timm:NAME, hf:NAME_OR_PATH, gguf:FILE or package.module:function.", extra=MODEL)
    ]
    host: Annotated[str, Meta(description="Listening address.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0: any free port.")] = 8000
    api_keys: Annotated[File | None, Meta(description="API keys, one per line; mode 0600.")] = None
    open: Annotated[bool, Meta(description="Access without a key from this machine.")] = False
    name: Annotated[str | None, Meta(description="Model name in the API. Default: folder name.")] = None
    most_waiting: Annotated[int, Meta(ge=0, description="Longest queue; beyond it, 429.")] = 256
    deadline: Annotated[float, Meta(ge=0.1, description="Time limit per answer, in s.")] = 600.0
    drain: Annotated[Rate, Meta(description="Grace period after SIGTERM, in s.")] = 30.0
    max_body: Annotated[float, Meta(ge=0.01, description="Largest request body, in MiB.")] = 4.0
    certificate: Annotated[Pem | None, Meta(description="TLS: the certificate.")] = None
    certificate_key: Annotated[Pem | None, Meta(description="TLS: its private key.")] = None
    allow_origin: Annotated[Texts, Meta(description="Origin of pages that may call this; * for all.")] = msgspec.field(
        default_factory=list
    )
    preprocess: Preprocess = None
    strict: Annotated[bool, Meta(description="Refuse unknown fields of requests.")] = False


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `penstock bench`."""

    rare = ("bind", "depth", "device", "peer", "policy", "seed", "serial_images", "weights")

    model: Annotated[str, Meta(description=VISION, extra=MODEL)]
    num_images: Annotated[Positive, Meta(description="Images per pass.")] = 500
    stages: Annotated[str, Meta(description="Stage counts, like 1,2,4.")] = "1,2,4"
    policy: Annotated[str, Meta(description="Policies: balanced,equal-blocks,equal-size,smallest-crossing.")] = (
        "balanced"
    )
    cut: Annotated[Texts, Meta(description="Cuts of an additional row.", extra={"metavar": "A:after,B:after"})] = (
        msgspec.field(default_factory=list)
    )
    plan: Annotated[
        Texts, Meta(description="Plan of an additional row; sets --microbatch-size.", extra={"metavar": "plan.json"})
    ] = msgspec.field(default_factory=list)
    microbatch_size: Annotated[Positive, Meta(description="Rows per microbatch.")] = 1
    depth: Annotated[Positive, Meta(description="Microbatches that may wait at a cut.")] = 2
    passes: Annotated[Positive, Meta(description="Counted passes per row, 5 in the full protocol.")] = 1
    serial_images: Annotated[
        Positive | None, Meta(description="Images of the serial run. Default: as many as per pass.")
    ] = None
    peer: Annotated[bool, Meta(description="Comparison with torch.distributed.pipelining.")] = False
    seed: Seed = 0
    weights: WeightsFile = None
    pretrained: Pretrained = False
    threads: Threads = None
    device: Device = "cpu"
    runtime: Runtime = "eager"
    bind: Bind = None
    report: Annotated[
        PathText | None,
        Meta(description="Page that compares the rows.", extra={"metavar": "PAGE.html", "written": "file"}),
    ] = None


OnLoss = Literal["stop", "continue", "wait"]
ON_LOSS: tuple[str, ...] = get_args(OnLoss)
