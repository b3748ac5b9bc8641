import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.lab import PRESETS, HostSpec, LabSpec, parse_lab, preset, read_lab, write_lab
from penstock.cluster.lab.spec import check_fit
from penstock.errors import ClusterError

GIB = 2**30
EXAMPLE = """
name = "edge"
bandwidth = "1 Gbit/s"
[[hosts]]
name = "host0"
cpu = 0.35
memory = "1 GiB"
[[hosts]]
name = "host1"
cpu = 1
memory = "512 MiB"
bandwidth = "100 Mbit/s"
arch = "aarch64"
"""


def test_a_lab_file_is_read() -> None:
    assert parse_lab(EXAMPLE) == LabSpec(
        name="edge",
        hosts=(
            HostSpec(name="host0", cpu=0.35, memory_bytes=GIB, bandwidth_bytes_per_s=125e6),
            HostSpec(name="host1", cpu=1.0, memory_bytes=GIB // 2, bandwidth_bytes_per_s=12.5e6, arch="aarch64"),
        ),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("cpu = 0.35", "cpus = 0.35"), "fields of host host0 must be among .*; got 'cpus'; did you mean cpu"),
        (('name = "edge"', 'nmae = "edge"'), "fields of a lab file must be among .*; got 'nmae'; did you mean name"),
        (("cpu = 0.35", "cpu = 0.35\nlatency = 1"), "host host0 has latency, .* remove latency"),
        (('name = "edge"', 'loss = "1%"'), "a lab file has loss, .* remove loss"),
        (('name = "host1"', 'name = "host0"'), "'host0' is given 2 times"),
        (("cpu = 0.35", "cpu = 0"), "host0 has 0; write it like cpu = 0.35"),
        (("cpu = 0.35", "cpu = nan"), "host0 has nan"),
        (("cpu = 0.35", "cpu = true"), "cpu must be a number; host host0 has True"),
        (("cpu = 0.35", ""), "cpu of host host0 not found; add it"),
        (('memory = "1 GiB"', 'memory = "lots"'), "memory of host host0: .*'lots'"),
        (('memory = "1 GiB"', 'memory = "1 kB"'), "host0 has 1000 bytes"),
        (('"1 Gbit/s"', '"1 GB/s"'), "bandwidth of the lab: .*'1 GB/s'"),
        (('"1 Gbit/s"', '"1 bit/s"'), "host0 has 1 bit/s"),
        (('name = "edge"', 'name = "Edge!"'), "a lab name must be 1 to 20 of .*; got 'Edge!'"),
        (('"aarch64"', '"../x"'), "host1 has '../x'"),
        (('"aarch64"', "64"), "arch of host host1 must be text; got 64"),
        (('name = "edge"', "name = 3"), "the lab's name must be text; got 3"),
        (('name = "edge"', "name = "), "a lab file must be TOML, but this one is not"),
    ],
)
def test_a_wrong_lab_file_is_explained(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        parse_lab(EXAMPLE.replace(*change, 1))
    assert "\n" not in str(caught.value)


def test_a_lab_has_hosts() -> None:
    with pytest.raises(ClusterError, match="1 to 200 hosts; got 0"):
        parse_lab('name = "a"')
    with pytest.raises(ClusterError, match="tables"):
        parse_lab('hosts = ["a", "b"]')


def test_a_missing_file_is_explained(tmp_path: object) -> None:
    with pytest.raises(ClusterError, match="penstock lab init"):
        read_lab(f"{tmp_path}/none.toml")


def test_an_unknown_host_is_named_with_the_nearest() -> None:
    with pytest.raises(ClusterError, match=r"'hots1' not found .*host0, host1; .*host1"):
        parse_lab(EXAMPLE).host("hots1")


names = st.from_regex(re.compile(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?"), fullmatch=True)
hosts = st.builds(
    HostSpec,
    name=names,
    cpu=st.floats(min_value=0.01, max_value=1000),
    memory_bytes=st.integers(2**20, 2**48),
    bandwidth_bytes_per_s=st.none() | st.integers(1000, 10**13).map(lambda bits: bits / 8),
    arch=st.none() | st.sampled_from(["aarch64", "x86_64"]),
)


@given(st.builds(LabSpec, name=names, hosts=st.lists(hosts, min_size=1, unique_by=lambda h: h.name).map(tuple)))
def test_a_written_lab_reads_back_equal(spec: LabSpec) -> None:
    assert parse_lab(write_lab(spec)) == spec


@pytest.mark.parametrize("board", PRESETS)
@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_cores", [1, 2, 16])
def test_presets_leave_the_machine_room(board: str, num_hosts: int, num_cores: int) -> None:
    spec = preset(board, num_hosts, num_cores)
    assert check_fit(spec, num_cores, 2**50) == []
    assert [host.name for host in spec.hosts] == [f"host{index}" for index in range(num_hosts)]


def test_an_unknown_board_is_named_with_the_nearest() -> None:
    with pytest.raises(ClusterError, match="did you mean raspberry-pi-4"):
        preset("rasberry-pi-4", 4, 2)


def test_lab_larger_than_the_machine_is_refused() -> None:
    spec = preset("raspberry-pi-4", 4, 2, cpu=0.5)
    [cpu, memory] = check_fit(spec, 2, 8 * GIB)
    assert cpu == ("the hosts' CPU shares add up to 2 of 2 cores; above 70% they disturb each other: use cpu = 0.35")
    assert "17.2 GB but the machine has 8.59 GB" in memory
    with pytest.raises(ClusterError, match=r"1 cores; got 2; use cpu = 0.17 or fewer hosts"):
        check_fit(spec, 1, 64 * GIB)
