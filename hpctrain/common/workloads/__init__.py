"""What a network computes and sends, layer by layer."""
