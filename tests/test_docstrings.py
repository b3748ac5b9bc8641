"""Examples in docstrings that say what comes out give that."""

import json

from tests.processes import run_python

# the names that examples use of other modules
CODE = """
import doctest, importlib, json, pkgutil
import penstock
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.meta import parameter_shapes
from penstock.zoo.weights.weights import TensorWeights

flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
names = {module.name for module in pkgutil.walk_packages(penstock.__path__, "penstock.")} - {"penstock.__main__"}
more = {each.__name__: each for each in (TensorWeights, open_images, parameter_shapes)}
found = {name: doctest.testmod(importlib.import_module(name), optionflags=flags, extraglobs=more) for name in names}
print(json.dumps([sum(each.attempted for each in found.values()), [name for name in found if found[name].failed]]))
"""


def test_examples_give_what_they_say() -> None:
    done = run_python("-c", CODE, deadline_s=120.0)
    attempted, failed = json.loads(done.stdout.splitlines()[-1])
    assert failed == [], done.stdout
    assert attempted > 100
