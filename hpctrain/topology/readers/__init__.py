"""One reader per format: text in, plain records out (hpctrain.topology.records)."""
