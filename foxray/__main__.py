"""`python -m foxray` is the `foxray` command."""

from foxray.cli import main

if __name__ == "__main__":
    main()
