"""Liveness: every process says that it lives, and the first to see that one does not tells the others.

It goes through the store, not through the data channels: a stopped process or a cut cable is noticed
also while no data flows. There is one verdict per group, the first one written.

    every process, each BEAT_S:   count up my number;  read the others' and the verdict
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

from penstock.errors import DeviceLost, RunError

BEAT_S = 0.5
SILENCE_S = 5.0
_VERDICT = "verdict"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What ended a run: the rank it happened to, and a sentence for people."""

    rank: int
    message: str
    lost: bool


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
    ) -> None:
        self._store = PrefixStore("penstock/health", store)
        self._rank = rank
        self._names = names
        self._on_failure = on_failure
        self._silence_s = silence_s
        self._stop = threading.Event()
        self.failure: Verdict | None = None
        self._thread = threading.Thread(target=self._watch, name="penstock-health", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Tell everybody that this process failed; only the first report of a group counts."""
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._announce(Verdict(self._rank, f"{self._names[self._rank]}: {text}", lost=False))

    def check(self) -> None:
        """Raise what happened to the group, if anything did."""
        if self.failure is not None:
            kind = DeviceLost if self.failure.lost else RunError
            raise kind(self.failure.message)

    def wait_for_failure(self, timeout_s: float) -> None:
        """After a broken connection: wait a little for the reason, then raise it if there is one."""
        deadline = time.monotonic() + timeout_s
        while self.failure is None and time.monotonic() < deadline and self._thread.is_alive():
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
                self._store.set(f"beat/{self._rank}", str(beat))
                self._look(heard)
            except RuntimeError:
                if not self._stop.is_set():
                    self._fail(Verdict(0, f"{self._names[0]} does not answer: the store is gone", lost=True))
            self._stop.wait(BEAT_S)

    def _look(self, heard: dict[int, tuple[str, float]]) -> None:
        if self._store.check([_VERDICT]):
            document = json.loads(self._store.get(_VERDICT))
            self._fail(Verdict(int(document["rank"]), str(document["message"]), bool(document["lost"])))
            return
        for other in range(len(self._names)):
            if other == self._rank or not self._store.check([f"beat/{other}"]):
                continue
            number = self._store.get(f"beat/{other}").decode()
            if number != heard[other][0]:
                heard[other] = (number, time.monotonic())
            silence_s = time.monotonic() - heard[other][1]
            if silence_s > self._silence_s and number != "gone":
                name = self._names[other]
                message = f"{name} has not answered for {silence_s:.0f} s: it was stopped, cut off or is out of memory"
                self._announce(Verdict(other, message, lost=True))
                return

    def _announce(self, verdict: Verdict) -> None:
        try:
            self._store.compare_set(_VERDICT, "", json.dumps(asdict(verdict)))
            document = json.loads(self._store.get(_VERDICT))
            verdict = Verdict(int(document["rank"]), str(document["message"]), bool(document["lost"]))
        except RuntimeError:
            pass  # the store is gone: this process goes by what it knows itself
        self._fail(verdict)

    def _fail(self, verdict: Verdict) -> None:
        if self.failure is None:
            self.failure = verdict
            self._on_failure()
