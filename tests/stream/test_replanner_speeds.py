"""Speeds of devices from what their heartbeats count."""

from penstock.errors import TransportError
from penstock.stream.replanner import Count, ObservedSpeeds


class Watched:
    """Two devices that compute for as long as is said."""

    def __init__(self, *, at_first: bool = False, planned: dict[str, float] | None = None) -> None:
        self.now_s = 0.0
        self.counts = {"a": Count(0.0, 0), "b": Count(0.0, 0)}
        self.broken = False
        self.speeds = ObservedSpeeds(
            self.count, lambda: {"a": 0.1, "b": 0.2}, planned=planned, at_first=at_first, clock=lambda: self.now_s,
            window_s=5.0,
        )  # fmt: skip

    def count(self) -> dict[str, Count]:
        if self.broken:
            raise TransportError("a heartbeat of before")
        return dict(self.counts)

    def work(self, num: int, **seconds: float) -> bool:
        """Let some seconds pass in which each device computes microbatches, and look."""
        self.now_s += 6.0
        for name, each_s in seconds.items():
            self.counts[name] = Count(self.counts[name].busy_s + num * each_s, self.counts[name].num_run + num)
        return self.speeds.changed()


def test_changed_speeds_are_detected() -> None:
    watched = Watched()
    assert not watched.work(10, a=0.1, b=0.4)
    assert watched.speeds.now() == {}
    assert not watched.work(10, a=0.1, b=0.4)
    assert watched.speeds.now() == {"a": 1.0, "b": 0.5}
    assert not watched.work(10, a=0.11, b=0.4)
    assert watched.work(10, a=0.1, b=1.2)
    name, factor = watched.speeds.most_changed()
    assert name == "b"
    assert abs(factor - 1 / 3) < 1e-9
    watched.speeds.accept()
    assert not watched.work(10, a=0.1, b=1.2)


def test_few_measurements_cause_no_replan() -> None:
    watched = Watched()
    watched.work(10, a=0.1, b=0.2)
    assert not watched.work(3, a=1.0, b=1.0)
    assert watched.speeds.now() == {}
    watched.now_s += 1.0  # within the window
    watched.counts["a"] = Count(100.0, 100)
    assert not watched.speeds.changed()
    watched.broken = True
    watched.now_s += 10.0
    assert not watched.speeds.changed()


def test_first_speeds_are_reported() -> None:
    watched = Watched(at_first=True)
    assert not watched.work(10, a=0.1, b=0.4)
    assert watched.work(10, a=0.1, b=0.4)
    assert watched.speeds.now() == {"a": 1.0, "b": 0.5}
    assert not watched.work(10, a=0.1, b=0.4)


def test_a_device_that_is_slower_than_it_was_planned_for() -> None:
    # it slowed down while the speeds were measured that the plan was made of
    watched = Watched(planned={"a": 1.0, "b": 1.0})
    assert not watched.work(10, a=0.1, b=0.6)
    assert watched.work(10, a=0.1, b=0.6)
    assert watched.speeds.most_changed()[0] == "b"
    # what it does there is known no better: that is usual from now on
    watched = Watched(planned={"a": 1.0, "b": 1.0})
    watched.work(10, a=0.1, b=0.28)
    assert not watched.work(10, a=0.1, b=0.28)
    assert watched.work(10, a=0.1, b=0.2)
