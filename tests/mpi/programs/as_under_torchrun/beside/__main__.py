"""``python -m beside RANK``"""

import sys

from .inner import NAME

print(NAME, sys.argv[1:], __package__)
