"""From which checkpoint and with which changes an earlier run goes on."""
