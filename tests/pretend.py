"""A device that is not the CPU and needs no GPU: its tensors lie in ordinary memory, but nothing else may touch them.

As on a GPU, an operation whose tensors lie on two devices fails, and values come to the host by a copy alone. So code
that forgets to move a tensor fails here too. Copies that need not wait are made when somebody waits for them, so code
that reads a buffer too early, or writes to it, fails as well.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
# whatever else is made on a device, or moved there, begins with one of the first two
_FACTORIES = ["empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace", "eye"]
HELD_BYTES, MOST_BYTES = 12_345, 67_890


class Pretended(Tensor):
    """A tensor on the pretended device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Pretended":
        with torch.inference_mode(
            held.is_inference()
        ):  # a view of an ordinary tensor is ordinary in inference mode too
            made: Pretended = torch.Tensor._make_wrapper_subclass(
                cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
                device=torch.device(NAME, 0),
            )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.held})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        # in inference mode operators come whole that consist of others
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
            return function.decompose(*args, **given)
        copies = function.overloadpacket in {torch.ops.aten.copy_, torch.ops.aten._to_copy}
        for leaf in pytree.tree_leaves((args, given)):
            # single numbers may come from the CPU
            if isinstance(leaf, Tensor) and not isinstance(leaf, cls) and leaf.dim() and not copies:
                raise RuntimeError(f"{function} got tensors on {NAME} and on {leaf.device}")
        module.num_read += function.overloadpacket is torch.ops.aten._local_scalar_dense
        if copies:
            late = _copy_later(args, given)
            if late is not None:
                return late
        leaves = given.get("device") is not None and given["device"].type != NAME
        if given.get("device") is not None:
            given["device"] = torch.device("cpu")
        result = function(*pytree.tree_map(_held, args), **pytree.tree_map(_held, given))
        if leaves:
            module.most_left = max(module.most_left, result.numel())
        returns = function._schema.returns
        if not returns or any(r.alias_info is not None and r.alias_info.is_write for r in returns):
            written = given.get("out", args[0] if args else None)
            if isinstance(written, cls) and written.shape != written.held.shape:
                raise NotImplementedError(f"{function} changes the shape of what is there")
            return written
        return result if leaves else pytree.tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, result)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, Pretended) else leaf


class _Copy:
    """A copy between host and device that need not be made at once; made at the latest when `make` is called."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source, self._made = target, source, threading.Lock()
        self._values = source.clone()  # the device reads in the order of what is queued
        self.done = False
        if isinstance(target, Pretended):
            target.held.copy_(source)
        else:
            target.copy_(torch.full_like(target, 1))

    def make(self) -> None:
        with self._made:
            if self.done:
                return
            self.done = True
            if not isinstance(self._target, Pretended):
                self._target.copy_(self._values)
            elif not torch.equal(self._source.contiguous().view(torch.uint8), self._values.view(torch.uint8)):
                raise RuntimeError("a buffer was written to before the device had copied it")


_queued = threading.local()


def _copy_later(args: Sequence[Any], given: Mapping[str, Any]) -> Tensor | None:
    """Queue a copy between host and device, if it need not be made now; all earlier ones are made otherwise."""
    left: list[_Copy] = _queued.__dict__.setdefault("copies", [])
    target, source = args[0], args[1] if len(args) > 1 else None
    waits = not (given.get("non_blocking") or (len(args) > 2 and args[2]))
    if waits or not isinstance(source, Tensor) or isinstance(target, Pretended) == isinstance(source, Pretended):
        while left and waits:
            left.pop(0).make()
        return None
    left.append(_Copy(target, _held(source)))
    written: Tensor = target
    return written


class _Event:
    """What `torch.cuda.Event` is for GPUs; a copy that was queued before it is made when somebody waits."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.timed, self.at_s = enable_timing, -1.0
        self._copies: list[_Copy] = []

    def record(self, _stream: object) -> None:
        self.at_s = time.perf_counter()
        self._copies = list(_queued.__dict__.get("copies", ()))

    def query(self) -> bool:
        return self.at_s >= 0 and all(copy.done for copy in self._copies)

    def synchronize(self) -> None:
        module.num_waits += 1
        for copy in self._copies:
            copy.make()

    def elapsed_time(self, other: "_Event") -> float:
        assert self.timed
        assert 0 <= self.at_s <= other.at_s
        return 1e3 * (other.at_s - self.at_s)


class _Module(_DummyBackendModule):
    """What `torch.cuda` is for GPUs."""

    available = False  # where it is, checkpoints are written through its streams, which there are none of
    Event = _Event
    num_settled = num_waits = num_read = 0
    most_left = 0  # numbers of the largest tensor that was copied to the host

    def is_available(self) -> bool:
        return self.available

    def current_stream(self, _device: torch.device) -> "_Module":
        return self

    def synchronize(self) -> None:
        self.num_settled += 1
        for copy in _queued.__dict__.pop("copies", ()):
            copy.make()

    def memory_allocated(self, _device: torch.device) -> int:
        return HELD_BYTES

    def max_memory_allocated(self, _device: torch.device) -> int:
        return MOST_BYTES

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return MOST_BYTES - HELD_BYTES, MOST_BYTES

    def get_device_name(self, _device: torch.device) -> str:
        return "Pretended GPU"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


module = _Module()


@cache
def pretend() -> tuple[torch.device, torch.library.Library]:
    """Make the device known to torch; it stays so as long as the second of what this gives."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    library = torch.library.Library("aten", "IMPL")

    def made_by(factory: Any) -> Any:
        def make(*given: Any, **how: Any) -> Tensor:
            return Pretended(factory(*given, **{**how, "device": torch.device("cpu"), "pin_memory": False}))

        return make

    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        factory = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, made_by(factory), "PrivateUse1")
    return torch.device(NAME, 0), library
