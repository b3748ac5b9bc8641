"""Lock of exports: torch.export changes settings of the whole process while it runs, and is not thread-safe."""

import threading

# held during a capture, which turns mkldnn, cudnn and nnpack off, and while settings of torch are read
EXPORTING = threading.RLock()
