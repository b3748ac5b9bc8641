"""Runs the examples in docstrings, and prints how many were tried and the modules in which some failed."""

import doctest
import importlib
import json
import pkgutil
from typing import Any

import penstock
from penstock.zoo.data.image_names import open_images
from penstock.zoo.models.meta import parameter_shapes
from penstock.zoo.weights.weights import TensorWeights

flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
names = {module.name for module in pkgutil.walk_packages(penstock.__path__, "penstock.")} - {"penstock.__main__"}
# the names that examples use of other modules
more: dict[str, Any] = {each.__name__: each for each in (TensorWeights, open_images, parameter_shapes)}
found = {name: doctest.testmod(importlib.import_module(name), optionflags=flags, extraglobs=more) for name in names}
print(json.dumps([sum(each.attempted for each in found.values()), [name for name in found if found[name].failed]]))
