"""An environment as one archive that starts wherever it is unpacked, for nodes with disks of their own."""
