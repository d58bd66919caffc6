"""`python -m lowmem_load` is the command `lowmem-load`."""

from lowmem_load.cli.start import main

if __name__ == "__main__":
    main()
