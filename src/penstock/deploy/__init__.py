"""Put stages onto ranks and take them down: choose cuts, send programs and weights, run workers, feed a stream."""
