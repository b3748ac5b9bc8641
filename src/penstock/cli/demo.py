"""`penstock demo`."""
def demo() -> None:
    """x"""
