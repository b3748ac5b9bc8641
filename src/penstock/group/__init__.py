"""Process groups: launch, rendezvous, liveness, dismissal and regrouping."""
