"""Training on emulated hosts: stages, replicas, schedules, beside torch's own means."""
