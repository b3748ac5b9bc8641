"""Constants of messages and gradient sums between processes, used by the engine and by the planner's predictions."""

# rank 0, the driver, feeds the inputs, receives the results and serves the store that the other ranks connect to
FEEDER = 0
# buffers at each end of a cut in each direction, so that a message is processed while the next arrives; and at both
DEPTH = 2
NUM_BUFFERS = 2 * DEPTH
# bytes of gradients that are summed together: large enough for the network, small enough to send the first early
BUCKET_BYTES = 8 * 2**20
_LEAST_BUCKET_BYTES, _BUCKETS = 2**19, 4
# largest total traffic of a bucket that is sent directly rather than around a ring
_AT_ONCE_BYTES = 2**18
# buckets in flight at a time: while one waits for the network, another is summed
NUM_ALL_REDUCES = 2


def bucket_limit(num_bytes: float) -> float:
    """Return the largest size of a bucket for `num_bytes` of weights on the same devices.

    A small model also gets several buckets; otherwise none would be sent before the last backward ends.

    >>> [bucket_limit(num_bytes) / 2**20 for num_bytes in (2**20, 8 * 2**20, 2**30)]
    [0.5, 2.0, 8.0]
    """
    return min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, num_bytes / _BUCKETS))


def adds_up_at_once(num_ranks: int, num_bytes: float) -> bool:
    """Return True if ranks send a whole bucket to each other, rather than parts of it around a ring.

    A ring sends fewer bytes, in more messages one after the other.

    >>> adds_up_at_once(4, 2_000), adds_up_at_once(4, 2_000_000), adds_up_at_once(2, 2_000_000)
    (True, False, True)
    """
    return num_ranks <= 2 or num_ranks * num_bytes <= _AT_ONCE_BYTES
