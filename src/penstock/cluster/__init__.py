"""The machines themselves: an emulated cluster on one of them."""
