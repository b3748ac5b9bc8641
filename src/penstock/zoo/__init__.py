"""Names of models and data to objects: timm, transformers, functions, checkpoints, images."""

from penstock.zoo.check import check_weights
from penstock.zoo.convert import Converted, convert_checkpoint
from penstock.zoo.image_set import ImageSet
from penstock.zoo.images import open_images
from penstock.zoo.meta import meta_parameters
from penstock.zoo.models import ZooModel, load_model
from penstock.zoo.names import nearest
from penstock.zoo.preprocess import Transform, hf_transform, timm_transform
from penstock.zoo.save import save_weights
from penstock.zoo.weight_files import FileWeights
from penstock.zoo.weights import JoinedWeights, ModuleWeights, RandomWeights, TensorWeights, Weights

__all__ = [
    "Converted",
    "FileWeights",
    "ImageSet",
    "JoinedWeights",
    "ModuleWeights",
    "RandomWeights",
    "TensorWeights",
    "Transform",
    "Weights",
    "ZooModel",
    "check_weights",
    "convert_checkpoint",
    "hf_transform",
    "load_model",
    "meta_parameters",
    "nearest",
    "open_images",
    "save_weights",
    "timm_transform",
]
