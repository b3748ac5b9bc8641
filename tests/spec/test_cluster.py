from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.lab import preset, write_lab
from penstock.errors import ClusterError, UsageError
from penstock.spec.cluster import Cluster, Device, Link, parse_cluster, read_cluster, write_cluster
from penstock.units import parse_seconds
from tests.spec.samples import make_cluster

OFFICE = """
name = "office"
feeder = "desk"
bandwidth = "1 Gbit/s"
latency = "0.2 ms"
[[devices]]
name = "board"
speed = 0.25
memory = "1 GiB"
bandwidth = "100 Mbit/s"
latency = "1 ms"
[[devices]]
name = "desk"
speed = 1
memory = "8 GiB"
threads = 4
address = "192.168.1.10"
[[links]]
between = ["desk", "board"]
bandwidth = "300 Mbit/s"
"""


def test_a_file_by_hand() -> None:
    cluster = parse_cluster(OFFICE)
    assert cluster.feeding == Device(
        name="desk", speed=1.0, memory_bytes=2**33, threads=4, address="192.168.1.10",
        bandwidth_bytes_per_s=125e6, latency_s=0.2e-3,
    )  # fmt: skip
    assert cluster.device("board").bandwidth_bytes_per_s == 12.5e6
    assert cluster.device("board").latency_s == 1e-3
    assert cluster.links == (Link(between=("desk", "board"), bandwidth_bytes_per_s=37.5e6),)


def test_a_cluster_loads_back_equal(tmp_path: Path) -> None:
    cluster = parse_cluster(OFFICE)
    (tmp_path / "cluster.toml").write_text(write_cluster(cluster))
    assert read_cluster(tmp_path / "cluster.toml") == cluster


@given(
    st.floats(1e-6, 1e6),
    st.integers(1, 2**50),
    st.none() | st.floats(0.1, 1e12),
    st.floats(0, 10),
)
def test_any_device_loads_back_equal(speed: float, memory: int, bandwidth: float | None, latency: float) -> None:
    device = Device(name="a", speed=speed, memory_bytes=memory, bandwidth_bytes_per_s=bandwidth, latency_s=latency)
    cluster = Cluster(devices=(device,))
    assert parse_cluster(write_cluster(cluster)) == cluster


def test_a_lab_file_is_a_cluster_file() -> None:
    cluster = parse_cluster(write_lab(preset("raspberry-pi-4", 3, num_cores=2, cpu=1.5)))
    assert [device.name for device in cluster.devices] == ["host0", "host1", "host2"]
    assert cluster.devices[0].speed == 1.0  # one thread uses one core at most
    assert cluster.devices[0].memory_bytes == 2**32
    assert cluster.devices[0].bandwidth_bytes_per_s == 125e6
    assert cluster.feeding.name == "host0"


def test_without_a_device() -> None:
    cluster = Cluster(
        devices=make_cluster(1, 2, 3).devices, feeder="a", links=(Link(between=("a", "b")), Link(between=("b", "c")))
    )
    rest = cluster.without({"a"})
    assert [device.name for device in rest.devices] == ["b", "c"]
    assert rest.feeding.name == "b"
    assert rest.links == (Link(between=("b", "c")),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices = 3", r"devices are \[\[devices\]\] tables"),
        ("a =", "a cluster file is TOML, but this one is not"),
        ("", "a cluster has at least one device"),
        ("[[devices]]\nname = 'a'", "device a has no speed; add it"),
        ("[[devices]]\nname = 'a'\nspede = 1", "has the fields .* not 'spede'; did you mean 'speed'"),
        ("[[devices]]\nname = 'a'\nspeed = 'x'\nmemory = '1 GiB'", "speed of device a is a number, not 'x'"),
        ("[[devices]]\nname = 'a'\nspeed = 0\nmemory = '1 GiB'", "speed is above 0, but a has 0"),
        ("[[devices]]\nname = 'a'\nspeed = 1\nmemory = 'much'", "memory of device a: a size is a number and a unit"),
        (
            "feeder = 'b'\n[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'",
            "the feeder is one of the devices, not 'b'",
        ),
        ("latency = '3'\n[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'", "latency of the cluster: a duration is"),
        ("[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'\n[[hosts]]\nname = 'h'", "not both; keep one kind"),
        (
            "[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'\n[[links]]\nbetween = ['a', 'b']",
            "a link is between devices, not 'b'",
        ),
        (
            "[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'\n[[links]]\nbetween = ['a', 'a']",
            "a link is between two devices and given once, not a and a",
        ),
        (
            "[[devices]]\nname = '../../x'\nspeed = 1\nmemory = '1 B'",
            "a device's name is 1 to 128 letters, digits or .*, not '../../x'; rename it",
        ),
        ('[[devices]]\nname = "a\\nb"\nspede = 1', r"a device's name is 1 to 128 letters.*, not 'a\\nb'; rename it"),
        (
            "[[hosts]]\nname = '/'\ncpu = 1\nmemory = '1 B'",
            "a device's name is 1 to 128 letters, digits or .*, not '/'",
        ),
        (2 * "[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'\n", "each device has its own name, but 'a'"),
    ],
)
def test_wrong_files(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"a cluster file must be readable, but .* is not \(No such file"):
        read_cluster(tmp_path / "none.toml")


def test_durations() -> None:
    assert parse_seconds("0.2 ms") == 0.2e-3
    assert parse_seconds("50us") == 50e-6
    with pytest.raises(UsageError, match="a duration is a number and a unit, not '5'"):
        parse_seconds("5")


@given(st.lists(st.tuples(st.sampled_from([0.2, 0.5, 1.0]), st.floats(0.01, 4.0)), min_size=1, max_size=6))
def test_devices_that_are_alike_get_the_mean_of_their_speeds(devices: list[tuple[float, float]]) -> None:
    described, seen = zip(*devices, strict=True)
    found = [device.speed for device in make_cluster(*described).at_mean_speeds(seen).devices]
    assert sum(found) == pytest.approx(sum(seen))
    for kind in set(described):
        own = [pair for pair in zip(described, found, seen, strict=True) if pair[0] == kind]
        assert len({speed for _, speed, _ in own}) == 1
        assert sum(speed for _, speed, _ in own) == pytest.approx(sum(speed for _, _, speed in own))


def test_devices_that_are_not_alike_keep_their_own_speeds() -> None:
    assert [device.speed for device in make_cluster(0.5, 0.2).at_mean_speeds([0.7, 0.1]).devices] == [0.7, 0.1]
