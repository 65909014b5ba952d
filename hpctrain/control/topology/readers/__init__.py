"""One reader per format: text in, plain records out (hpctrain.control.topology.records)."""
