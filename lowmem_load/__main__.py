"""`python -m lowmem_load` is the command `lowmem-load`."""

from lowmem_load.cli.main import main

if __name__ == "__main__":
    main()
