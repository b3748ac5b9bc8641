"""Message tags between two ranks: messages with one tag are ordered, and independent of other tags.

    0                     jobs, signals and tensors that both sides expect next
    [1, 2**30]            links between stages: sets of 4,096, one set for each opening of channels
    [2**30 + 1, 2**31)    documents exchanged in training, and gradients, by bucket

Tag -t carries tensors from device to device; their headers have tag t.
"""

CONTROL = 0
_LINKS_PER_SET, _NUM_SETS = 2**12, 2**18
_TRAINING_SETS = _NUM_SETS // 2
# in addition to links
DOCUMENTS = 2**30 + 1
BUFFERS = 2**30 + 2
OUTPUTS = 2**30 + 3
STATE = 2**30 + 4
CLOCK = 2**30 + 5
FEATURES = 2**30 + 6
LOADED = 2**30 + 7
ROWS = 2**30 + 8
INPUT_GRADIENTS = 2**30 + 9
_BUCKETS, _NUM_BUCKETS = 2**30 + 2**20, 2**29


def link_tag(number: int, link: int) -> int:
    """Return the tag of a link in a set of channels.

    >>> link_tag(0, 0), link_tag(1, 3)
    (1, 4100)
    """
    return 1 + number % _NUM_SETS * _LINKS_PER_SET + link % _LINKS_PER_SET


def training_set(generation: int, *, evaluates: bool = False) -> int:
    """Return the number of the set of channels for training steps, or for evaluations during training.

    Streams use the number of their job, which counts from 0.
    """
    return _TRAINING_SETS + (2 * generation + evaluates) % _TRAINING_SETS


def bucket_tag(bucket: int) -> int:
    """Return the tag of a bucket of gradients."""
    return _BUCKETS + bucket % _NUM_BUCKETS


def device_tag(tag: int) -> int:
    """Return the device tag of the tensors whose headers have this tag.

    >>> device_tag(7)
    -7
    """
    return -tag
