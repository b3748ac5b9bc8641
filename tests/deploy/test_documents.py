"""What workers are asked is read strictly."""

import json
from typing import Any

import pytest

from penstock.deploy.jobs import RunBaseline, read_document, write_document
from penstock.errors import ProgramError
from penstock.group.world import Leave

STAGES: dict[str, Any] = {
    "kind": "stages", "source": "bundle", "number": 1, "ranks": [1], "sizes": {"batch": 1},
    "options": {"depth": 2, "threads": 1}, "device_names": ["a", "b"], "programs": {"0": []},
    "plan": "p", "part": "b",
}  # fmt: skip


def test_documents_come_back_as_they_were() -> None:
    alone = RunBaseline(program="{}", sizes={"batch": 2}, threads=1, num_inputs=8, num_microbatches=50)
    assert read_document(write_document(alone), 2) == alone
    assert read_document(write_document(Leave(message="done")), 2) == Leave(message="done")
    stages = read_document(json.dumps(STAGES).encode(), 2)
    assert read_document(write_document(stages), 2) == stages


@pytest.mark.parametrize("device", ["../../x", "..", "/", "", 7, None])
def test_a_job_reads_no_folder_outside_of_the_bundle(device: object) -> None:
    with pytest.raises(ProgramError, match=r"the device of a job must be 1 to 128 letters|`\$\.part`"):
        read_document(json.dumps({**STAGES, "part": device}).encode(), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "peer"}, "'peer'"),
        ({"ranks": [2]}, r"below 2\b.* got 2"),
        ({"ranks": []}, "got no stage"),
        ({"ranks": [[1]]}, r"`\$\.ranks\[0\]`"),
        ({"programs": {"1": []}}, r"below 1; got 1"),
        ({"source": "weights", "programs": {"0": []}}, "stage 0 .* 1 programs; got 0"),
        ({"device_names": ["a"]}, r"2 names.* got 1"),
        ({"sizes": {"batch": 2**40}}, r"`\$\.sizes\[\.\.\.\]`"),
        ({"options": {"depth": 0}}, r"`\$\.options.depth`"),
        ({"options": {"threads": 10**6}}, r"`\$\.options.threads`"),
        ({"options": {"import": "os"}}, "`import`"),
        ({"import": "os"}, "`import`"),
    ],
)
def test_contradicting_job_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        read_document(json.dumps({**STAGES, **change}).encode(), 2)
    assert "\n" not in str(caught.value)


def test_unreadable_job_is_refused() -> None:
    for data in (b"", b"\xff", b"[" * 10_000, b"null", b"{}"):
        with pytest.raises(ProgramError, match="start every process with the same command"):
            read_document(data, 2)
