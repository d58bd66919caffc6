"""Files as named tensors, their bytes on disks and in stores, and the executor that reads them. Untrusted input."""
