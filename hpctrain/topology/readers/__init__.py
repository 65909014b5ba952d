"""One reader a format: text in, plain records out (hpctrain.topology.records)."""
