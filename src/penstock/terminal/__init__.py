"""Progress bars and the live view of stages, silent without a terminal."""
