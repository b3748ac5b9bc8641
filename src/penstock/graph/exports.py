"""One export at a time: torch.export changes settings of the whole process while it runs, and is not for threads."""

import threading

# for as long as a model is captured, and as settings of torch are read: mkldnn, cudnn and nnpack are off meanwhile
EXPORTING = threading.RLock()
