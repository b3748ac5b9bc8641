"""What a run did and when. This room only records: nothing here knows of stages' work or of the network."""
