"""Liveness: every process says that it lives, and the first to see that one does not tells the others.

It goes through the store, not through the data channels: a stopped process or a cut cable is noticed
also while no data flows. There is one verdict per group, the first one written.

    every process, each BEAT_S:   count up my number, say how far I am;  read the others' and the verdict
    a number stands for SILENCE_S, or the store does not answer:   verdict
    a verdict:                    abort all transports; waits end, and `failure` says why
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from penstock.errors import DeviceLost, OutOfMemory, RunError
from penstock.memory import is_out_of_memory

BEAT_S = 1.0
SILENCE_S = 5.0
_VERDICT = "verdict"
_FIRST_BEAT = 6  # times the silence, for processes that have only just met


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ended a run: the rank it happened to, and a sentence for people."""

    rank: int
    message: str
    lost: bool
    memory: bool = False  # it ran out of memory


class Health:
    """Watches over one group of processes from one of them.

    `names` says for every rank what people call it, as in `stage 2 on host3`. `on_failure` is called
    once, from the watching thread. The store client must be this object's own: a call that waits
    blocks every other call on the same client.

    Example:
        health = Health(store, rank=0, names=["feeder", "stage 0"], on_failure=transport.abort)
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: list[str],
        on_failure: Callable[[], None],
        *,
        silence_s: float = SILENCE_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self._store = PrefixStore("penstock/health", store)
        self._rank = rank
        self._names = names
        self._on_failure = on_failure
        self._silence_s = silence_s
        self.beat_s = beat_s
        self._heard: dict[int, str] = {}
        self._begun: set[int] = set()
        self.status: Callable[[], str] = str  # what this process says of itself with every beat; nothing
        self._stop = threading.Event()
        self.failure: Verdict | None = None
        self._thread = threading.Thread(target=self._watch, name="penstock-health", daemon=True)
        self._thread.start()

    def call_instead(self, on_failure: Callable[[], None]) -> None:
        """Call something else on a failure, at once if there was one already."""
        self._on_failure = on_failure
        if self.failure is not None:
            on_failure()

    def report(self, error: BaseException) -> None:
        """Tell everybody that this process failed; only the first report of a group counts."""
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        memory = is_out_of_memory(error)
        self.announce(Verdict(self._rank, f"{self._names[self._rank]}: {text}", lost=False, memory=memory))

    def statuses(self) -> list[str]:
        """Give what every process said of itself last, this one included."""
        return [self.status(), *(said for rank, said in self._heard.items() if rank != self._rank)]

    @property
    def watching(self) -> bool:
        """Tell whether a verdict may still come."""
        return self.failure is None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what happened to the group, if anything did."""
        if self.failure is not None:
            kind = OutOfMemory if self.failure.memory else DeviceLost if self.failure.lost else RunError
            raise kind(self.failure.message)

    def wait_for_failure(self, timeout_s: float) -> None:
        """After a broken connection: wait a little for the reason, then raise it if there is one."""
        deadline = time.monotonic() + timeout_s
        while self.watching and time.monotonic() < deadline:
            time.sleep(0.02)
        self.check()

    def close(self) -> None:
        """Stop watching; the others are told that this silence is meant."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            with contextlib.suppress(RuntimeError):  # the store went first: the others know
                self._store.set(f"beat/{self._rank}", "gone")

    def _watch(self) -> None:
        heard = dict.fromkeys(range(len(self._names)), ("", time.monotonic()))
        beat = 0
        while not self._stop.is_set() and self.failure is None:
            beat += 1
            try:
                self._store.set(f"beat/{self._rank}", f"{beat} {self.status()}")
                self._look(heard)
            except RuntimeError:
                if not self._stop.is_set():
                    self._fail(Verdict(0, f"{self._names[0]} does not answer: the store is gone", lost=True))
            self._stop.wait(self.beat_s)

    def _look(self, heard: dict[int, tuple[str, float]]) -> None:
        if self._store.check([_VERDICT]):
            self._fail(_read(self._store.get(_VERDICT)))
            return
        for other, beat in self._beats().items():
            if beat != heard[other][0]:
                heard[other] = (beat, time.monotonic())
                self._heard[other] = beat.partition(" ")[2]
            silence_s = time.monotonic() - heard[other][1]
            if silence_s > self._silence_s * (1 if beat else _FIRST_BEAT) and beat != "gone":
                name = self._names[other]
                message = f"{name} has not answered for {silence_s:.0f} s: it was stopped, cut off or is out of memory"
                self.announce(Verdict(other, message, lost=True))
                return

    def _beats(self) -> dict[int, str]:
        """Read everybody's last beat in one exchange with the store; empty for who has not begun."""
        others = [rank for rank in range(len(self._names)) if rank != self._rank]
        self._begun |= {rank for rank in others if rank not in self._begun and self._store.check([f"beat/{rank}"])}
        known = sorted(self._begun)
        values = self._store.multi_get([f"beat/{rank}" for rank in known]) if known else []
        return dict.fromkeys(others, "") | {r: value.decode() for r, value in zip(known, values, strict=True)}

    def announce(self, verdict: Verdict) -> None:
        """Make this the verdict of the group, unless there is one already; ends every wait."""
        try:
            self._store.compare_set(_VERDICT, "", json.dumps(asdict(verdict)))
            verdict = _read(self._store.get(_VERDICT))
        except RuntimeError:
            pass  # the store is gone: this process goes by what it knows itself
        self._fail(verdict)

    def _fail(self, verdict: Verdict) -> None:
        if self.failure is None:
            self.failure = verdict
            self._on_failure()


def _read(data: bytes) -> Verdict:
    """Read a verdict that another process has written."""
    document = json.loads(data)
    return Verdict(
        int(document["rank"]), str(document["message"]), bool(document["lost"]), bool(document.get("memory"))
    )
