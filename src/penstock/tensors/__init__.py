"""Where a tensor lies: on which device, with which strides."""
