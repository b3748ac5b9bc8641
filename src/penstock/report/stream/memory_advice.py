"""Which devices are near the end of their memory, and how much they would need."""

from penstock.tracing.trace import ProcessTrace, Run
from penstock.units import format_bytes

# a device that holds more of its memory than this may run out at the next larger input
NEAR = 0.85
# what is left free of a memory that is large enough
_ROOM = 0.7


def advise_memory(run: Run) -> list[str]:
    """Name each device that is near its limit, with what it holds, what it may, and what would be enough.

    Processes of one host share its memory. What they hold is counted for each, libraries that they share included.
    """
    hosts: dict[str, list[ProcessTrace]] = {}
    for process in run.processes:
        known = process.rank < len(run.facts.hosts)
        hosts.setdefault(run.facts.hosts[process.rank] if known else process.device, []).append(process)
    lines = []
    for host, processes in hosts.items():
        held = sum(_peak(process) for process in processes)
        limit = max(process.machine.memory_bytes for process in processes)
        if limit and held > NEAR * limit:
            stages = [str(s) for s, rank in enumerate(run.facts.ranks) if rank in {p.rank for p in processes}]
            lines.append(
                f"{host} (stage {', '.join(stages)}) came to hold {format_bytes(held)} of its {format_bytes(limit)} of "
                f"memory ({held / limit:.0%}): give it {format_bytes(held / _ROOM)}, a smaller stage or smaller "
                "microbatches."
            )
    return lines


def _peak(process: ProcessTrace) -> float:
    return max((c.value for c in process.counters if c.name == "memory_bytes"), default=0.0)
