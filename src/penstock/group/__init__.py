"""Process groups: launch, rendezvous, liveness, shutdown and regrouping.

Terms, and what they mean:

    driver       rank 0, `FEEDER`: serves the store (unless torchrun's agent does), feeds inputs, receives results
    hello        a process's join announcement: versions, addresses, size of the run
    board        heartbeat store: a small key-value store that each process serves for the ranks that watch it
    beat         heartbeat: a counter and a status that a process writes on its own board
    verdict      failure record of a group: the first one written on rank 0's board counts
    roll call    membership round: rank 0 calls the next group, survivors and newcomers answer
    dismissal    orderly shutdown by rank 0, with a message for people at the other machines (`World.last_word`)
    knock        probe of a port: connect and disconnect
"""
