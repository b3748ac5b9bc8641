"""What is installed without extras can be imported and used."""

import os
import subprocess
import sys

from tests.warm import NAME

# what the extras of pyproject.toml install, by the names that are imported
EXTRAS = [
    "timm",
    "torchvision",
    "PIL",
    "transformers",
    "tokenizers",
    "sklearn",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "ml_dtypes",
    "openvino",
    "torch_pruning",
    "tensorboard",
    "wandb",
    "gguf",
    "accelerate",
    "llguidance",
    "prometheus_client",
    "pydantic",
    "multipart",
    "starlette",
    "uvicorn",
    "jinja2",
    "plotly",
]
USED = ["cli.main", "deploy.worker", "generate.generator", "recipes.loop", "recipes.texts", "recipes.launch"]
PROGRAM = f"""
import importlib, sys
sys.modules |= dict.fromkeys({EXTRAS}, None)
import penstock
for name in penstock.__all__:
    getattr(penstock, name)
for name in {USED}:
    importlib.import_module("penstock." + name)
"""


def test_every_public_name_is_there_without_extras() -> None:
    env = {name: value for name, value in os.environ.items() if name != NAME}  # in an interpreter that has none of them
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=env)
    assert (ran.returncode, ran.stderr) == (0, "")
