"""One export at a time: torch.export changes settings of the whole process while it runs, and is not for threads."""

import threading

# held during a capture, which turns mkldnn, cudnn and nnpack off, and while settings of torch are read
EXPORTING = threading.RLock()
