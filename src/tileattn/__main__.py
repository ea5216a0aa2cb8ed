import sys

from tileattn.cli import main

if __name__ == "__main__":  # a worker process that is spawned imports this file too
    sys.exit(main())
