"""Point-to-point transfer of bytes and tensors between ranks, independent of stages."""
