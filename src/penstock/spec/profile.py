"""Profiles: costs of a model on one kind of device."""

import math
import os
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from penstock.errors import ProfileError
from penstock.spec.fields import decode_json, read_bytes, write_json
from penstock.spec.plan import Generation, Precision, runtime_name

COUNTED = "counted"  # the device of a profile without measurements


class Boundary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place between two units, or the model's input or output: its name and the bytes of one message across it.

    If `gradient` is set, training sends a gradient of the same size back; not so if everything before is frozen.

    >>> Boundary(name="blocks.0:after", bytes_per_row=100, constant_bytes=8).num_bytes(3)
    308
    """

    name: str
    bytes_per_row: float
    constant_bytes: float = 0.0
    gradient: bool = True

    def num_bytes(self, rows: float) -> float:
        """Return the bytes that cross for one microbatch of `rows` rows."""
        return self.bytes_per_row * rows + self.constant_bytes


class Unit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs between two boundaries: seconds at each of the profile's batch sizes, and bytes.

    - `forward_s[i]`, `backward_s[i]`: median seconds for `profile.rows[i]` rows; plans for training need both;
    - `forward_spread_s`, `backward_spread_s`: interquartile range of the measurements, or empty;
    - `parameters`: names and bytes of the tensors that the unit uses; a name used by several units is one tensor;
    - `fixed_bytes`: bytes of weights that are not trained, and so have no gradients and optimizer state;
    - `kept_bytes_per_row`: bytes of activations kept from the forward for the backward, or of a sequence's caches;
    - `working_bytes_per_row`, `working_bytes`: bytes of temporary values while the unit runs, per row and constant.
    """

    forward_s: tuple[float, ...]
    forward_spread_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] | None = None
    backward_spread_s: tuple[float, ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    fixed_bytes: float = 0.0
    kept_bytes_per_row: float = 0.0
    working_bytes_per_row: float = 0.0
    working_bytes: float = 0.0


class RuntimeColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the whole model on a runtime other than eager, and the error of its outputs relative to eager.

    - `forward_s[i]`: median seconds for `profile.rows[i]` rows; `eager_s[i]` was measured in the same minute;
    - `error`: norm of the difference of the outputs, relative to the norm of eager's outputs.
    """

    runtime: str
    precision: Precision
    keep: tuple[str, ...] = ()
    forward_s: tuple[float, ...]
    eager_s: tuple[float, ...]
    error: float

    @property
    def name(self) -> str:
        """Display name, as in `onnxruntime:int8+head`."""
        return runtime_name(self.runtime, self.precision, self.keep)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a model on one kind of device: `boundaries[u]` and `boundaries[u + 1]` enclose `units[u]`.

    The first boundary is the model's input and the last its output; the others are cuts, by name. Seconds are for this
    kind of device, which has speed 1:

    - `loader_s_per_row`: to read and preprocess a row on the loading device;
    - `feed_s`, `result_s`: to send a microbatch, and to receive and write its result;
    - `send_s_per_byte`, `receive_s_per_byte`: CPU time of the two sides of a message;
    - `stage_overhead_s`: of a stage per microbatch, excluding its units;
    - `own_input_s`, `own_output_s`: savings if the driver holds the first or the last stage, as nothing is sent;
    - `sum_s_per_byte`: to copy gradients into a bucket and add another device's gradients;
    - `update_s_per_byte`: for AdamW's update, per byte of weights;
    - `base_bytes`: memory of a process before it holds a stage;
    - `script_bytes`: additional memory for the model's library and graph, in the driver or in every training process;
    - `calibration_s`: for a round of reference work, to compare the speeds of other devices; 0 if not measured.

    `runtimes` has a column for each other runtime that was measured, `generation` the caches with which the steps of a
    language model were measured; of these a plan takes only the length.

    Example:
        profile = read_profile("profile.json")
        profile.boundaries[3].name, profile.units[3].forward_s

    Raises `ProfileError` if the parts are inconsistent.
    """

    model: str
    graph: str  # fingerprint of the captured graph
    device: str
    threads: int
    rows: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    units: tuple[Unit, ...]
    base_bytes: float = 0.0
    script_bytes: float = 0.0
    loader_s_per_row: float = 0.0
    feed_s: float = 0.0
    result_s: float = 0.0
    send_s_per_byte: float = 0.0
    receive_s_per_byte: float = 0.0
    stage_overhead_s: float = 0.0
    own_input_s: float = 0.0
    own_output_s: float = 0.0
    sum_s_per_byte: float = 0.0
    update_s_per_byte: float = 0.0
    calibration_s: float = 0.0
    runtimes: tuple[RuntimeColumn, ...] = ()
    generation: Generation | None = None
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise ProfileError(f"the version of a profile must be 1; got {self.version}; profile again")
        if self.generation is not None and self.generation.lanes != 1:
            raise ProfileError(f"a profile of generation must have 1 lane; got {self.generation.lanes}; profile again")
        if self.threads < 1:
            raise ProfileError(f"threads must be at least 1; got {self.threads}; profile again")
        if not self.units or len(self.boundaries) != len(self.units) + 1:
            raise ProfileError(
                "a profile must have at least one unit, and one boundary more than units; got "
                f"{len(self.boundaries)} boundaries and {len(self.units)} units; profile again"
            )
        if not self.rows or list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ProfileError(
                f"rows must be batch sizes of at least 1 in rising order; got {list(self.rows)}; profile again"
            )
        names = [boundary.name for boundary in self.boundaries]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ProfileError(f"names of boundaries must be unique; {twice!r} is given twice; profile again")
        self._check_numbers()

    @property
    def cuts(self) -> tuple[str, ...]:
        """The names of the boundaries between units, in order."""
        return tuple(boundary.name for boundary in self.boundaries[1:-1])

    def noise(self, rows: int) -> float:
        """Return how far passes of a batch size lay apart, as a part of their seconds; 0 if it was not recorded.

        It is the sum of the interquartile ranges of all units, as if all units varied together. Between measured batch
        sizes it is interpolated.
        """
        seconds, spreads = [0.0] * len(self.rows), [0.0] * len(self.rows)
        for unit in self.units:
            for sums, tables in (
                (seconds, (unit.forward_s, unit.backward_s)),
                (spreads, (unit.forward_spread_s, unit.backward_spread_s)),
            ):
                for table in tables:
                    for index, value in enumerate(table or ()):
                        sums[index] += value
        whole_s = interpolate(self.rows, seconds, rows)
        return interpolate(self.rows, spreads, rows) / whole_s if whole_s else 0.0

    def _check_numbers(self) -> None:
        for name in _NUMBERS:
            _check_number(name, getattr(self, name))
        for index, boundary in enumerate(self.boundaries):
            _check_number(f"boundaries[{index}].bytes_per_row", boundary.bytes_per_row)
            _check_number(f"boundaries[{index}].constant_bytes", boundary.constant_bytes)
        spared_s, most_s = self.own_input_s + self.own_output_s, self.stage_overhead_s + self.feed_s + self.result_s
        if spared_s > most_s * (1 + _EQUAL):
            raise ProfileError(
                "own_input_s + own_output_s must be at most stage_overhead_s + feed_s + result_s; got "
                f"{spared_s} and {most_s}; profile again"
            )
        for column in self.runtimes:
            where = f"the runtime {column.name}"
            _check_number(f"{where}.error", column.error)
            for name in ("forward_s", "eager_s"):
                table = getattr(column, name)
                _check_length(f"{where}.{name}", table, len(self.rows))
                for value in table:
                    _check_number(f"{where}.{name}", value)
            if not all(column.eager_s):
                raise ProfileError(f"{where}.eager_s must be above 0; profile again")
        sizes: dict[str, int] = {}
        for index, unit in enumerate(self.units):
            _check_unit(f"units[{index}]", unit, len(self.rows))
            for name, num_bytes in unit.parameters:
                if sizes.setdefault(name, num_bytes) != num_bytes:
                    raise ProfileError(
                        f"a tensor must have one size; {name} has {sizes[name]} and {num_bytes} bytes in "
                        f"units[{index}].parameters; profile again"
                    )


def interpolate(rows: Sequence[int], seconds: Sequence[float], wanted: int) -> float:
    """Return the seconds at a batch size by linear interpolation between measured sizes.

    Outside their range the nearest line is extrapolated; with one measurement seconds are proportional to rows.

    >>> interpolate((1, 4), (2.0, 5.0), 3)
    4.0
    """
    if wanted in rows:
        return seconds[list(rows).index(wanted)]
    if len(rows) == 1:
        return seconds[0] * wanted / rows[0]
    right = min(max(bisect_left(rows, wanted), 1), len(rows) - 1)
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (rows[right] - rows[left])
    return max(0.0, seconds[left] + slope * (wanted - rows[left]))


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile file; raises `ProfileError` if it cannot be read or is inconsistent."""
    data = read_bytes(path, "a profile", ProfileError)
    try:
        return decode_json(data, Profile, "a profile", ProfileError)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def write_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write a profile file; reading it returns an equal profile."""
    write_json(path, profile)


# tolerance for sums of the same numbers in another order
_EQUAL = 1e-9
_NUMBERS = (
    "base_bytes", "script_bytes", "loader_s_per_row", "feed_s", "result_s", "send_s_per_byte", "receive_s_per_byte",
    "stage_overhead_s", "own_input_s", "own_output_s", "sum_s_per_byte", "update_s_per_byte", "calibration_s",
)  # fmt: skip


def _check_unit(where: str, unit: Unit, num_rows: int) -> None:
    for name in ("forward_s", "backward_s", "forward_spread_s", "backward_spread_s"):
        table = getattr(unit, name)
        if table is None or (not table and "spread" in name):
            continue
        _check_length(f"{where}.{name}", table, num_rows)
        for value in table:
            _check_number(f"{where}.{name}", value)
    for name in ("fixed_bytes", "kept_bytes_per_row", "working_bytes_per_row", "working_bytes"):
        _check_number(f"{where}.{name}", getattr(unit, name))
    for name, num_bytes in unit.parameters:
        _check_number(f"{where}.parameters {name}", num_bytes)


def _check_length(where: str, table: Sequence[float], num_rows: int) -> None:
    if len(table) != num_rows:
        raise ProfileError(
            f"{where} must have one number for each of the profile's {num_rows} batch sizes; got {len(table)}; "
            "profile again"
        )


def _check_number(where: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ProfileError(f"{where} must be a number of at least 0; got {value}; profile again")
