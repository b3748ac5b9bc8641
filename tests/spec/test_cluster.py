import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.lab import preset, write_lab
from penstock.errors import ClusterError, UsageError
from penstock.spec.cluster import Cluster, Device, Link, parse_cluster, read_cluster, write_cluster
from penstock.spec.fields import decode_json
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


def test_cluster_file_by_hand_is_read() -> None:
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


@given(st.floats(1e-6, 1e6), st.integers(1, 2**50), st.none() | st.floats(0.1, 1e12), st.floats(0, 10))
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


def test_cluster_without_a_device_keeps_the_others() -> None:
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
        ("devices = 3", r"devices must be \[\[devices\]\] tables"),
        ("a =", "a cluster file must be TOML"),
        ("", "a cluster must have at least one device"),
        ("[[devices]]\nname = 'a'", "speed of device a not found; add it"),
        ("[[devices]]\nname = 'a'\nspede = 1", "must be among .*; got 'spede'; did you mean speed"),
        ("[[devices]]\nname = 'a'\nspeed = 'x'\nmemory = '1 GiB'", "speed of device a must be a number; got 'x'"),
        ("[[devices]]\nname = 'a'\nspeed = 0\nmemory = '1 GiB'", "speed must be above 0; a has 0"),
        (
            "[[devices]]\nname = 'a'\nspeed = 1\nmemory = 'much'",
            "memory of device a: a size must be a number and a unit",
        ),
        (
            "feeder = 'b'\n[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'",
            "the feeder must be one of the devices; got 'b'",
        ),
        (
            "latency = '3'\n[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'",
            "latency of the cluster: a duration must be",
        ),
        ("[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'\n[[hosts]]\nname = 'h'", "keep one kind"),
        (
            "[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'\n[[links]]\nbetween = ['a', 'b']",
            "a link must be between devices; got 'b'",
        ),
        (
            "[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'\n[[links]]\nbetween = ['a', 'a']",
            "a link must be between two devices and given once; got a and a",
        ),
        (
            "[[devices]]\nname = '../../x'\nspeed = 1\nmemory = '1 B'",
            "a device's name must be 1 to 128 letters, digits or .*; got '../../x'; rename it",
        ),
        (
            '[[devices]]\nname = "a\\nb"\nspede = 1',
            r"a device's name must be 1 to 128 letters.*; got 'a\\nb'; rename it",
        ),
        (
            "[[hosts]]\nname = '/'\ncpu = 1\nmemory = '1 B'",
            "a device's name must be 1 to 128 letters, digits or .*; got '/'",
        ),
        (2 * "[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 B'\n", "names of devices must be unique; 'a'"),
    ],
)
def test_wrong_cluster_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


def test_missing_cluster_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cluster file .* cannot be read \(No such file"):
        read_cluster(tmp_path / "none.toml")


def test_durations_are_parsed() -> None:
    assert parse_seconds("0.2 ms") == 0.2e-3
    assert parse_seconds("50us") == 50e-6
    with pytest.raises(UsageError, match=r"duration .*got '5'"):
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


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("folder", "~/ps", "ps"),
        ("folder", "~//a/b", "a/b"),
        ("venv", "~/ps/.venv", "ps/.venv"),
        ("python", "~/bin/python3", "./bin/python3"),
        ("python", "python3.12", "python3.12"),
        ("folder", "/srv/ps", "/srv/ps"),
        ("ssh", "pi@~board", "pi@~board"),
    ],
)
def test_paths_in_the_home_folder(field: str, value: str, found: str) -> None:
    text = f"[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 GiB'\n{field} = '{value}'\n"
    read = parse_cluster(text)
    assert getattr(read.devices[0], field) == found
    assert parse_cluster(write_cluster(read)) == read


@pytest.mark.parametrize("field", ["folder", "venv", "python"])
@pytest.mark.parametrize("value", ["~", "~/", "~bob/ps", "$HOME/ps", "ps/$USER", "${HOME}"])
def test_paths_that_a_shell_would_expand_are_refused(field: str, value: str) -> None:
    with pytest.raises(ClusterError, match=rf"{field} of a .*{re.escape(repr(value))}"):
        parse_cluster(f"[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 GiB'\n{field} = '{value}'\n")


def test_a_byte_order_mark_before_the_text(tmp_path: Path) -> None:
    text = "[[devices]]\nname = 'a'\nspeed = 1\nmemory = '1 GiB'\n"
    (tmp_path / "a.toml").write_text(text, encoding="utf-8-sig")
    assert read_cluster(tmp_path / "a.toml") == parse_cluster(text)
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"between": ["a", "b"]}')
    assert decode_json((tmp_path / "a.json").read_bytes(), Link, "a link", ClusterError).between == ("a", "b")
