"""States of the random generators that scripts use without passing one: Python's, NumPy's and torch's."""

import hashlib
import random
from array import array
from typing import Any

import numpy as np
import torch


class RandomStates:
    """The global generators of this process.

    Example:
        states = RandomStates()
        if states.digests() != theirs:
            states.write(received)
    """

    def read(self) -> dict[str, Any]:
        """Return the states as JSON values."""
        version, words, gauss = random.getstate()
        name, keys, *rest = np.random.get_state(legacy=True)
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, [int(key) for key in keys], *rest],
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
        }

    def write(self, states: dict[str, Any]) -> None:
        """Set the generators to the states of another process.

        Raises `ValueError`, `TypeError`, `KeyError` or `RuntimeError` if these are not states.
        """
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))

    def digests(self) -> dict[str, str]:
        """Return a digest of each generator, also of the current GPU's if it is in use."""
        _, words, gauss = random.getstate()
        _, keys, *rest = np.random.get_state(legacy=True)
        found = {
            "random": array("Q", words).tobytes() + repr(gauss).encode(),
            "numpy": np.asarray(keys).tobytes() + repr(rest).encode(),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if torch.cuda.is_initialized():
            found["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
        return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in found.items()}
