"""What a plan takes: seconds, bytes and link time, from a profile and a cluster."""
