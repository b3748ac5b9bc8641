"""`python -m penstock`, which is also what torchrun starts: `torchrun ... -m penstock bench ...`."""

import sys

from penstock.cli.main import main

sys.exit(main())
