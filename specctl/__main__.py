"""`python -m specctl` is `specctl`."""

from specctl.cli import main

if __name__ == "__main__":
    main()
