"""What tells that memory could not be had."""

import subprocess
import sys

import pytest
import torch

from penstock.errors import OutOfMemory, RunError
from penstock.memory import is_out_of_memory, num_killed, peak_bytes
from tests.fewer import long
from tests.processes import run_python


@pytest.mark.long
def test_torch_s_own_allocator_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    failed = RunError("operation linear failed")
    failed.__cause__ = caught.value
    assert is_out_of_memory(failed)


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemory("host1"), torch.OutOfMemoryError("CUDA")])
def test_errors_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RunError("not enough memory"), RuntimeError("unsupported memory format")])
def test_the_word_alone_says_nothing(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.skipif(sys.platform != "linux", reason="the count is Linux's")
def test_the_system_counts_what_it_kills() -> None:
    assert isinstance(num_killed(), int)


@pytest.mark.fresh
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hand a peak down to what a process starts")
def test_the_peak_is_of_the_process_itself() -> None:
    held = torch.ones(2**28 // 4)  # 256 MiB, which what is started here never holds
    assert peak_bytes() > held.nbytes
    code = "from penstock.memory import peak_bytes; print(peak_bytes())"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 0 < int(started.stdout) < held.nbytes


@pytest.mark.parametrize(("gigabytes", "needed"), [(1, True), long(64, False), long(3, True)])
def test_too_few_addresses_are_one_line(gigabytes: int, needed: bool) -> None:
    limit = (
        "import resource, sys\nfrom penstock.cli.main import main\nlimit = int(sys.argv.pop(1)) * 10**9\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\nsys.exit(main(sys.argv[1:]))"
    )
    ended = run_python("-c", limit, str(gigabytes), "split", "timm:no_such_model", deadline_s=60)
    assert ended.stderr.count("\n") == 1
    assert ("ulimit -v" in ended.stderr) == needed


def test_an_error_that_is_its_own_cause() -> None:
    error = RunError("the connection broke")
    error.__cause__ = error
    assert not is_out_of_memory(error)
