"""Gives this host, which is a namespace of its own, a name, and becomes another program."""

import os
import socket
import sys

socket.sethostname(sys.argv[1])
os.execvp(sys.argv[2], sys.argv[2:])
