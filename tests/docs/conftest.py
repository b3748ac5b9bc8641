"""What the tests of the documentation share with those of the command line."""

from tests.cli.conftest import penstock as penstock
