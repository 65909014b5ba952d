"""What runs in each rank: communicators, adapters, training, measurements."""
