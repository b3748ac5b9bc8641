"""The memory of this process."""


def anonymous_bytes() -> float | None:
    """Give the bytes of this process that no file stands behind: what it holds itself, without programs and libraries.

    None on systems that do not say.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return None
