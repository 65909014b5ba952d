"""One module for each command or group of commands: options are read, the work is called, the answer is printed."""
