"""Run a schedule on this process's stages over channels, and count what was done."""
