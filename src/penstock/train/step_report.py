"""What one process did in one step of training."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepReport:
    """Where one process's step went, in seconds and bytes.

    `wait_s` is for messages of neighbours, sending included; `synchronize_s` for the sums of gradients that
    the backwards did not cover, and for the losses of the others. `peak_memory_bytes` is the process's
    so far. `num_synchronizations` counts sums of gradients.

    Example:
        loss = pipe.train_step(images, labels, F.cross_entropy)
        print(pipe.last_step.forward_s, pipe.last_step.sent_bytes)
    """

    load_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    synchronize_s: float = 0.0
    sent_bytes: int = 0
    num_synchronizations: int = 0
    peak_memory_bytes: int = 0
