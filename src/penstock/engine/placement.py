"""Placements as data: the rank of each stage."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

LOST = -1  # replaces the rank of a process that has left the group


@dataclass(frozen=True, slots=True)
class Replica:
    """A complete pipeline: its ranks in the order of devices, the rank of each stage, and its share of each batch.

    `num_microbatches` is the number per step that a plan sets; without a plan, all replicas have the same number. A
    device that a plan leaves idle belongs to the first replica, without a stage.
    """

    devices: tuple[int, ...]
    stages: tuple[int, ...]
    num_microbatches: int | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of replicas and stages over the ranks of a world.

    replica 0   rank 0: stage 0   rank 1: stage 1
    replica 1   rank 2: stage 0   rank 3: stage 1
    """

    replicas: tuple[Replica, ...]

    def replica_of(self, rank: int) -> int:
        """Return the replica that a rank belongs to."""
        return next(index for index, replica in enumerate(self.replicas) if rank in replica.devices)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds."""
        replica = self.replicas[self.replica_of(rank)]
        return [stage for stage, holder in enumerate(replica.stages) if holder == rank]

    @property
    def ranks(self) -> set[int]:
        """Ranks of all devices, with a stage or idle."""
        return {rank for replica in self.replicas for rank in replica.devices}

    def holders(self, stage: int) -> list[int]:
        """Return the ranks that hold a stage, in all replicas that have not lost it."""
        return [replica.stages[stage] for replica in self.replicas if replica.stages[stage] != LOST]

    def renumbered(self, ranks: Mapping[int, int]) -> "Grid":
        """Return the same grid with the ranks of another group; ranks that are not in `ranks` are lost.

        >>> Grid((Replica((0, 1), (0, 1)),)).renumbered({0: 0}).replicas[0].stages
        (0, -1)
        """
        return Grid(
            tuple(
                replace(
                    replica,
                    devices=tuple(ranks[rank] for rank in replica.devices if rank in ranks),
                    stages=tuple(ranks.get(rank, LOST) for rank in replica.stages),
                )
                for replica in self.replicas
            )
        )

    def with_idle(self, ranks: Iterable[int]) -> "Grid":
        """Return the same grid with an idle device added for each of these ranks that the grid lacks.

        >>> Grid((Replica((0, 1), (0, 1)),)).with_idle([0, 2]).replicas[0].devices
        (0, 1, 2)
        """
        first, *others = self.replicas
        known = self.ranks
        idle = (rank for rank in ranks if rank not in known)
        return Grid((replace(first, devices=(*first.devices, *idle)), *others))

    def rows(self, num_rows: int) -> list[range]:
        """Divide the rows of a batch among the replicas: evenly, or along their microbatches.

        If every replica has `num_microbatches`, the batch is first divided into the microbatches of all replicas, so
        that for the same total a row's microbatch does not depend on the number of replicas.
        """
        counts = [replica.num_microbatches for replica in self.replicas]
        if None in counts:
            return shares(num_rows, len(counts))
        ends = list(accumulate(count or 0 for count in counts))
        edges = [0, *(rows.stop for rows in shares(num_rows, ends[-1]))]
        return [range(edges[start], edges[stop]) for start, stop in pairwise([0, *ends])]


def shares(num_rows: int, num_parts: int) -> list[range]:
    """Divide rows into consecutive parts that differ by at most one row; with few rows some parts are empty.

    >>> shares(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    each, more = divmod(num_rows, num_parts)
    starts = [part * each + min(part, more) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
