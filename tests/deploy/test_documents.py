"""What workers are asked is read strictly."""

import json
from typing import Any

import pytest

from penstock.deploy.documents import RunBaseline, read_document, write_document
from penstock.errors import ProgramError
from penstock.group.world import Leave

STAGES: dict[str, Any] = {
    "kind": "stages", "source": "bundle", "number": 1, "ranks": [[[1], [0]]], "sizes": {"batch": 1}, "depth": 2,
    "threads": 1, "device_names": ["a", "b"], "programs": {"0": []}, "order": [0], "plan": "p", "device": "b",
}  # fmt: skip


def test_documents_come_back_as_they_were() -> None:
    alone = RunBaseline(program="{}", sizes={"batch": 2}, threads=1, num_inputs=8, num_microbatches=50)
    assert read_document(write_document(alone), 2) == alone
    assert read_document(write_document(Leave(message="done")), 2) == Leave(message="done")
    stages = read_document(json.dumps(STAGES).encode(), 2)
    assert read_document(write_document(stages), 2) == stages


@pytest.mark.parametrize("device", ["../../x", "..", "/", "", 7, None])
def test_a_job_reads_no_folder_outside_of_the_bundle(device: object) -> None:
    with pytest.raises(ProgramError, match=r"the device of a job is 1 to 128 letters|asked for something else"):
        read_document(json.dumps({**STAGES, "device": device}).encode(), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "peer"}, "asked for something else"),
        ({"ranks": [[[2], [0]]]}, "a stage runs on the run's 2 processes, not on rank 2"),
        ({"ranks": [[[1], [1]]]}, "the ranks of a stage take turns among 1, but an order names 1"),
        ({"ranks": [[[], []]]}, "take turns among 0"),
        ({"programs": {"1": []}}, "a job of 1 stages has no stage 1"),
        ({"source": "weights", "programs": {"0": []}}, "the programs of stage 0 take turns among 0"),
        ({"device_names": ["a"]}, "2 processes have 2 names, not 1"),
        ({"sizes": {"batch": 2**40}}, "asked for something else"),
        ({"depth": 0}, "asked for something else"),
        ({"threads": 10**6}, "asked for something else"),
        ({"import": "os"}, "asked for something else"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        read_document(json.dumps({**STAGES, **change}).encode(), 2)
    assert "\n" not in str(caught.value)


def test_nonsense_is_refused() -> None:
    for data in (b"", b"\xff", b"[" * 10_000, b"null", b"{}"):
        with pytest.raises(ProgramError, match="asked for something else"):
            read_document(data, 2)
