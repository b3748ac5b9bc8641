"""`penstock serve` under load: throughput in a lab, and a storm of requests of which none may be lost or different."""
