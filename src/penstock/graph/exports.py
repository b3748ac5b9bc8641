"""Lock for exports: torch.export changes process-wide settings while it runs, and is not thread-safe."""

import threading

# held during captures, which turn mkldnn, cudnn and nnpack off, and while torch settings are read
EXPORTING = threading.RLock()
