"""The machines themselves: an emulated cluster on one of them, and those that are reached by ssh."""
