"""`python -m penstock`, which is also what torchrun starts: `torchrun ... -m penstock bench ...`."""

import os
import sys


def run() -> int:
    """Run the command line after removing the current folder, which `-m` puts first on the path.

    Files there must not shadow other modules; see `module_command`.
    """
    here, source = os.path.realpath(os.getcwd()), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if not getattr(sys.flags, "safe_path", False) and os.path.realpath(sys.path[0]) == here != source:
        del sys.path[0]
    if "--debug" not in sys.argv:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
    from penstock.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
