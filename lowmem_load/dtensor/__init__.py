"""The DTensor seam: which elements of a sharded model this rank holds, and a target that fills them."""
