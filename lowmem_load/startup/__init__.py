"""Switching lowmem_load on from outside a program: `lowmem-load run`, and the variable that it sets."""
