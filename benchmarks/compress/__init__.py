"""What compression gives: a ViT trained on CIFAR-10, pruned and quantized, beside DeiT-S in the lab."""
